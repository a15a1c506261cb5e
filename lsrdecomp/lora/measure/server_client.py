"""Clients that ask a running server for log-probabilities of the next token.

Each request is with the adapter or without it.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from lsrdecomp.errors import LsrError
from lsrdecomp.gateway import REPLY_BYTES, REPLY_SECONDS, printable, read_json_text

Prompt = str | Sequence[int]
Token = int | str
"""A number where the server gives it, else the token's text."""
MAX_LOGPROBS = 20
"""Tokens whose log-probabilities are asked for, the likeliest ones: the most that vLLM gives unless
it is told otherwise (its --max-logprobs)."""
FEWEST_LOGPROBS = 5
"""The most that some OpenAI servers give."""


def connect(
    url: str, adapter: str | None, file: Path, *, needs_base: bool = True
) -> LlamaCpp | OpenAi:
    """Find out which server answers, and which of its adapters is meant.

    Parameters
    ----------
    url : str
        As ``http://127.0.0.1:8080``; a trailing ``/v1`` is left out.
    adapter : str, optional
        Its name, number or file name there. Absent, the only one there, or the one of ``file``'s
        name.
    file : Path
        The adapter as it lies here.
    needs_base : bool
        Whether a server that has one model alone is refused: it cannot be asked without the
        adapter.

    Raises
    ------
    LsrError
        If there is no such server, or none or several adapters are meant.
    """
    root = url.rstrip("/").removesuffix("/v1")
    if not root.startswith(("http://", "https://")):
        raise LsrError(
            f"{ascii(url)[:100]} is no address of a server, such as http://127.0.0.1:8080"
        )
    try:
        adapters = _request(f"{root}/lora-adapters")
    except _NotFoundError:
        adapters = None
    if isinstance(adapters, list):
        return _llama_cpp(root, adapters, adapter, file)
    models = _request(f"{root}/v1/models")
    return _openai(root, models, adapter, file, needs_base=needs_base)


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """llama.cpp's own server: every request says the scale of each adapter; 0 is off.

    ``scale`` is what the server says it scales the adapter by, if it says so.
    """

    root: str
    numbers: tuple[int, ...]
    number: int
    adapter: str
    scale: float | None
    server: ClassVar[str] = "llama.cpp"

    def ask(self, prompt: Prompt, *, adapted: bool) -> Mapping[Token, float]:
        """Return log-probabilities of the likeliest next tokens."""
        fields = {**self._fields(prompt, adapted=adapted), "n_predict": 1, "n_probs": MAX_LOGPROBS}
        reply = _request(f"{self.root}/completion", fields)
        try:
            tokens = reply["completion_probabilities"][0]["top_logprobs"]
            return {token["id"]: float(token["logprob"]) for token in tokens}
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise LsrError(f"{self.root}/completion: no log-probabilities in its answer") from error

    def complete(self, prompt: Prompt, new_tokens: int) -> str:
        """Return the greedy answer with the adapter."""
        fields = {**self._fields(prompt, adapted=True), "n_predict": new_tokens}
        return str(_request(f"{self.root}/completion", fields).get("content", ""))

    def _fields(self, prompt: Prompt, *, adapted: bool) -> dict[str, Any]:
        """Return what every request says; an adapter that is off there is asked for at 1."""
        scales = dict.fromkeys(self.numbers, 0.0)
        if adapted:
            scales[self.number] = self.scale or 1.0
        return {
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "temperature": 0,
            "cache_prompt": False,
            "lora": [{"id": number, "scale": scale} for number, scale in scales.items()],
        }


@dataclass(frozen=True, slots=True)
class OpenAi:
    """A server with OpenAI's completions, such as vLLM: an adapter is a model of its own.

    ``base`` is empty where the server has no other model.
    """

    root: str
    base: str
    adapter: str
    scale: ClassVar[float | None] = None
    server: ClassVar[str] = "OpenAI-compatible"

    def ask(self, prompt: Prompt, *, adapted: bool) -> Mapping[Token, float]:
        """Return log-probabilities of the likeliest next tokens."""
        model = self.adapter if adapted else self.base
        reply = self._complete(_openai_fields(model, prompt, new_tokens=1))
        try:
            likeliest = reply["choices"][0]["logprobs"]["top_logprobs"][0]
            return {_token(key): float(value) for key, value in likeliest.items()}
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise LsrError(
                f"{self.root}/v1/completions: no log-probabilities in its answer"
            ) from error

    def complete(self, prompt: Prompt, new_tokens: int) -> str:
        """Return the greedy answer with the adapter."""
        fields = _openai_fields(self.adapter, prompt, new_tokens=new_tokens)
        reply = _request(f"{self.root}/v1/completions", fields)
        try:
            return str(reply["choices"][0]["text"])
        except (KeyError, IndexError, TypeError) as error:
            raise LsrError(f"{self.root}/v1/completions: no text in its answer") from error

    def _complete(self, fields: Mapping[str, Any]) -> Any:
        """Return the reply to the first request that the server does not refuse.

        vLLM gives token numbers on request; servers that know less refuse the word or the count.
        """
        attempts = (
            {"logprobs": MAX_LOGPROBS, "return_tokens_as_token_ids": True},
            {"logprobs": MAX_LOGPROBS},
            {"logprobs": FEWEST_LOGPROBS},
        )
        refusal = ""
        for attempt in attempts:
            try:
                return _request(f"{self.root}/v1/completions", {**fields, **attempt})
            except _RefusedError as error:
                refusal = str(error)
        raise LsrError(refusal)


def _openai_fields(model: str, prompt: Prompt, *, new_tokens: int) -> dict[str, Any]:
    """Return what a request for greedy completions says."""
    return {
        "model": model,
        "max_tokens": new_tokens,
        "temperature": 0,
        "seed": 0,
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
    }


def _token(key: str) -> Token:
    """Return the number of a token that is named by it, else its text."""
    number = key.removeprefix("token_id:")
    return int(number) if number != key and number.isdecimal() else key


def _llama_cpp(root: str, adapters: list[Any], adapter: str | None, file: Path) -> LlamaCpp:
    by_number = {entry["id"]: entry for entry in adapters if _has_id(entry, int)}
    names = {
        number: printable(str(entry.get("path", number))) for number, entry in by_number.items()
    }
    number = _choose(root, names, adapter, file)
    scale = by_number[number].get("scale")
    set_scale = float(scale) if isinstance(scale, int | float) else None
    return LlamaCpp(root, tuple(names), number, names[number], set_scale)


def _openai(root: str, reply: Any, adapter: str | None, file: Path, *, needs_base: bool) -> OpenAi:
    data = reply.get("data") if isinstance(reply, dict) else None
    models = [entry for entry in data if _has_id(entry, str)] if isinstance(data, list) else []
    if len(models) == 1 and not needs_base:
        return OpenAi(root, "", models[0]["id"])
    if len(models) < 2:
        raise LsrError(
            f"{root}/v1/models names {len(models)} models; an adapter that is served is named "
            "beside its base, and a model alone is compared with one here: give --base"
        )
    parents = {model["id"]: model.get("parent") for model in models}
    # Adapters have a parent; of a server that names none the first model is the base
    adapters = [name for name, parent in parents.items() if parent] or list(parents)[1:]
    chosen = adapters[_choose(root, dict(enumerate(adapters)), adapter, file)]
    base = parents[chosen]
    if not isinstance(base, str) or base not in parents:
        base = next(name for name in parents if name not in adapters)
    return OpenAi(root, base, chosen)


def _has_id(entry: Any, type_: type) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("id"), type_)


def _choose(root: str, names: Mapping[int, str], requested: str | None, file: Path) -> int:
    """Return the number of the adapter that is meant."""
    listing = ", ".join(f"{number} ({printable(name)[:80]})" for number, name in names.items())
    listing = listing[:1000] or "none"
    if requested is not None:
        matches = []
        for number, name in names.items():
            path = Path(name)
            if requested in (str(number), name, path.name, path.stem):
                matches.append(number)
        if len(matches) != 1:
            raise LsrError(
                f"{root} has no one adapter {ascii(requested)[:80]}; there are: {listing}"
            )
        return matches[0]
    if len(names) == 1:
        return next(iter(names))
    matches = [number for number, name in names.items() if Path(name).stem == file.stem]
    if len(matches) != 1:
        raise LsrError(f"{root} has {len(names)} adapters; say which by --served-as: {listing}")
    return matches[0]


class _RefusedError(LsrError):
    """The server does not take this request."""


class _NotFoundError(_RefusedError):
    """There is nothing at this address of the server."""


NOT_FOUND = (404, 405, 501)
"""Status codes of an address that a server does not have."""


def _request(address: str, fields: object = None) -> Any:
    body = None if fields is None else json.dumps(fields).encode()
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=REPLY_SECONDS) as reply:
            return _read_reply(reply, address)
    except urllib.error.HTTPError as error:
        message = printable(error.read(300).decode("utf-8", "replace").strip().partition("\n")[0])
        error_type = _NotFoundError if error.code in NOT_FOUND else _RefusedError
        raise error_type(f"{address}: status {error.code} {message}".strip()) from None
    except (urllib.error.URLError, OSError) as error:
        reason = printable(str(getattr(error, "reason", error)))
        raise LsrError(f"{address} cannot be reached: {reason}") from None
    except http.client.HTTPException as error:
        raise LsrError(f"{address} does not speak HTTP: {printable(str(error)[:200])}") from None
    except ValueError:
        raise LsrError(f"{address} answers something that is not JSON") from None


def _read_reply(reply: Any, address: str) -> Any:
    """Return the JSON of a reply; `ValueError` if it is none, `LsrError` if it does not end."""
    end = time.monotonic() + REPLY_SECONDS
    parts = []
    size = 0
    while part := reply.read1(2**16):
        parts.append(part)
        size += len(part)
        if size > REPLY_BYTES or time.monotonic() > end:
            raise LsrError(
                f"{address} answers more than {REPLY_BYTES:,} bytes, or longer than "
                f"{REPLY_SECONDS:g} s; its reply was not read further"
            )
    return read_json_text(b"".join(parts))
