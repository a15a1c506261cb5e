"""Asking a running server over HTTP for the log-probabilities of the next token, with and without an adapter."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lsrdecomp.errors import LsrError

Prompt = str | Sequence[int]
Token = int | str
"""A number where the server gives it, else the token's text."""
TOP = 20
FEW = 5
"""Most log-probabilities that some OpenAI servers give."""
PATIENCE = 300.0


def connect(url: str, adapter: str | None, file: Path) -> LlamaCpp | OpenAi:
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
        listed = _request(f"{root}/lora-adapters")
    except _NoPlaceError:
        listed = None
    if isinstance(listed, list):
        return _llama_cpp(root, listed, adapter, file)
    return _openai(root, _request(f"{root}/v1/models"), adapter, file)


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
    server: str = "llama.cpp"

    def ask(self, prompt: Prompt, *, adapted: bool) -> Mapping[Token, float]:
        """Log-probabilities of the likeliest next tokens."""
        # An adapter that is off in the server is asked for at full scale, for it is the adapter
        # that is looked at.
        chosen = (self.scale or 1.0) if adapted else 0.0
        lora = [
            {"id": number, "scale": chosen if number == self.number else 0.0}
            for number in self.numbers
        ]
        fields = {
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "n_predict": 1,
            "temperature": 0,
        }
        reply = _request(
            f"{self.root}/completion",
            fields | {"n_probs": TOP, "cache_prompt": False, "lora": lora},
        )
        try:
            return {
                token["id"]: float(token["logprob"])
                for token in reply["completion_probabilities"][0]["top_logprobs"]
            }
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise LsrError(f"{self.root}/completion: no log-probabilities in its answer") from error


@dataclass(frozen=True, slots=True)
class OpenAi:
    """A server with OpenAI's completions, such as vLLM: an adapter is a model of its own."""

    root: str
    base: str
    adapter: str
    scale: float | None = None
    server: str = "OpenAI-compatible"

    def ask(self, prompt: Prompt, *, adapted: bool) -> Mapping[Token, float]:
        """As `LlamaCpp.ask`."""
        fields = {
            "model": self.adapter if adapted else self.base,
            "max_tokens": 1,
            "temperature": 0,
            "seed": 0,
        }
        fields |= {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
        # vLLM gives token numbers on request; servers that know less refuse the word or the count.
        attempts = (
            {"logprobs": TOP, "return_tokens_as_token_ids": True},
            {"logprobs": TOP},
            {"logprobs": FEW},
        )
        for attempt in attempts:
            try:
                reply = _request(f"{self.root}/v1/completions", fields | attempt)
                break
            except _RefusedError as error:
                if attempt is attempts[-1]:
                    raise LsrError(str(error)) from None
        try:
            likeliest = reply["choices"][0]["logprobs"]["top_logprobs"][0]
            return {_token(key): float(value) for key, value in likeliest.items()}
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise LsrError(
                f"{self.root}/v1/completions: no log-probabilities in its answer"
            ) from error


def _token(key: str) -> Token:
    number = key.removeprefix("token_id:")
    return int(number) if number != key and number.isdecimal() else key


def _llama_cpp(root: str, listed: list[Any], adapter: str | None, file: Path) -> LlamaCpp:
    loras = {
        int(lora["id"]): lora
        for lora in listed
        if isinstance(lora, dict) and isinstance(lora.get("id"), int)
    }
    names = {number: str(lora.get("path", number)) for number, lora in loras.items()}
    chosen = _chosen(root, names, adapter, file)
    scale = loras[chosen].get("scale")
    return LlamaCpp(
        root,
        tuple(loras),
        chosen,
        names[chosen],
        float(scale) if isinstance(scale, int | float) else None,
    )


def _openai(root: str, reply: Any, adapter: str | None, file: Path) -> OpenAi:
    listed = reply.get("data") if isinstance(reply, dict) else None
    models = [
        model
        for model in listed or ()
        if isinstance(model, dict) and isinstance(model.get("id"), str)
    ]
    if len(models) < 2:
        text = f"{root}/v1/models names {len(models)} models; an adapter that is served is named beside its base"
        raise LsrError(text)
    parents = {model["id"]: model.get("parent") for model in models}
    adapters = [name for name, parent in parents.items() if parent] or list(parents)[1:]
    chosen = _chosen(root, dict(enumerate(adapters)), adapter, file)
    parent = parents[adapters[chosen]]
    base = (
        parent
        if isinstance(parent, str) and parent in parents
        else next(name for name in parents if name not in adapters)
    )
    return OpenAi(root, base, adapters[chosen])


def _chosen(root: str, names: Mapping[int, str], wanted: str | None, file: Path) -> int:
    """The number of the adapter that is meant."""
    listing = ", ".join(f"{number} ({name})" for number, name in names.items()) or "none"
    if wanted is not None:
        matches = [
            n
            for n, name in names.items()
            if wanted in (str(n), name, Path(name).name, Path(name).stem)
        ]
        if len(matches) != 1:
            raise LsrError(f"{root} has no one adapter {ascii(wanted)[:80]}; there are: {listing}")
        return matches[0]
    if len(names) == 1:
        return next(iter(names))
    matches = [number for number, name in names.items() if Path(name).stem == file.stem]
    if len(matches) != 1:
        raise LsrError(f"{root} has {len(names)} adapters; say which by --served-as: {listing}")
    return matches[0]


class _RefusedError(LsrError):
    """The server does not take this request."""


class _NoPlaceError(_RefusedError):
    """There is nothing at this address of the server."""


def _request(address: str, fields: object = None) -> Any:
    body = None if fields is None else json.dumps(fields).encode()
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        said = error.read(300).decode("utf-8", "replace").strip().partition("\n")[0]
        kind = _NoPlaceError if error.code in (404, 405, 501) else _RefusedError
        raise kind(f"{address}: status {error.code} {said}".strip()) from None
    except (urllib.error.URLError, OSError) as error:
        raise LsrError(f"{address} cannot be reached: {getattr(error, 'reason', error)}") from None
    except ValueError:
        raise LsrError(f"{address} answers something that is not JSON") from None
