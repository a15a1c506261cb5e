"""A running server asked whether an adapter acts: fake ones, and PEFT behind one."""

import json
import math
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from console import run_command

from lsrdecomp.errors import CheckpointError, LsrError
from lsrdecomp.gateway import REPLY_BYTES
from lsrdecomp.lora.measure import ask_server, measure
from lsrdecomp.lora.measure.ask import fitted_scale

WORDS = 30


@contextmanager
def running(answer):
    """A server in a thread; ``answer(path, fields)`` gives a status and a value."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply(None)

        def do_POST(self):
            self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def reply(self, fields):
            status, value = answer(self.path, fields)
            body = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def normalized(values):
    total = math.log(sum(math.exp(value) for value in values))
    return [value - total for value in values]


def table(prompt, change):
    """Log-probabilities over a few words: a base's, and how far an adapter moves them."""
    seed = sum(map(ord, prompt)) if isinstance(prompt, str) else sum(prompt)
    plain = [math.sin(seed + 3.0 * word) for word in range(WORDS)]
    return normalized([value + change * math.cos(seed * word) for word, value in enumerate(plain)])


class FakeLlama:
    """llama.cpp's two addresses; ``works`` is what it really multiplies an adapter by."""

    def __init__(self, scales, works=1.0, noise=0.0):
        self.scales, self.works, self.noise, self.count = scales, works, noise, 0

    def __call__(self, path, fields):
        if path == "/lora-adapters":
            listed = [
                {"id": i, "path": f"/here/{n}.gguf", "scale": s}
                for i, (n, s) in enumerate(self.scales.items())
            ]
            return 200, listed
        if path != "/completion":
            return 404, {"error": path}
        self.count += 1
        change = sum((one["id"] + 1) * one["scale"] for one in fields["lora"]) * self.works
        found = table(fields["prompt"], change + self.noise * math.sin(self.count))
        top = [
            {"id": word, "token": f"w{word}", "logprob": value} for word, value in enumerate(found)
        ]
        return 200, {"completion_probabilities": [{"top_logprobs": top[: fields["n_probs"]]}]}


class FakeOpenAi:
    """A server that completes as vLLM does, or that knows no token numbers and at most five."""

    def __init__(self, models, plain=False, works=1.0):
        self.models, self.plain, self.works = models, plain, works

    def __call__(self, path, fields):
        if path == "/v1/models":
            return 200, {"data": self.models}
        if path != "/v1/completions":
            return 404, {}
        numbers = fields.get("return_tokens_as_token_ids", False)
        if self.plain and (numbers or fields["logprobs"] > 5):
            return 400, {"error": "unknown field"}
        adapted = fields["model"] != self.models[0]["id"]
        found = table(fields["prompt"], self.works if adapted else 0.0)[: fields["logprobs"]]
        top = {
            (f"token_id:{word}" if numbers else f"w{word}"): value
            for word, value in enumerate(found)
        }
        return 200, {"choices": [{"logprobs": {"top_logprobs": [top]}}]}


@pytest.fixture
def adapter(tmp_path):
    path = tmp_path / "mine.gguf"
    path.write_bytes(b"")
    return path


def test_llama_cpp_tells_its_scale_and_whether_the_adapter_acts(adapter):
    with running(FakeLlama({"mine": 0.5})) as url:
        found = ask_server(url, adapter)
    assert (found.server, found.adapter, found.set_scale, found.noise) == (
        "llama.cpp",
        "/here/mine.gguf",
        0.5,
        0.0,
    )
    assert found.acts
    assert found.effect > 0.1
    with running(FakeLlama({"mine": 1.0}, works=0.0)) as url:
        found = ask_server(f"{url}/v1/", adapter)
    assert not found.acts
    with running(FakeLlama({"mine": 1.0}, works=0.0, noise=0.2)) as url:
        found = ask_server(url, adapter)
    assert not found.acts, "what two equal requests differ by is no effect"
    assert found.effect > 0.01
    with running(FakeLlama({"mine": 0.0})) as url:
        found = ask_server(url, adapter)
    assert (found.acts, found.set_scale, found.requested_scale) == (True, 0.0, 1.0)


def test_one_of_several_adapters_is_chosen_and_the_others_are_off(adapter):
    alone = {}
    for scales in ({"mine": 1.0}, {"mine": 1.0, "other": 1.0}):
        with running(FakeLlama(scales)) as url:
            alone[len(scales)] = ask_server(url, adapter).effect
            if len(scales) == 2:
                second = ask_server(url, adapter, name="other").effect
                assert ask_server(url, adapter, name="1").effect == second
                with pytest.raises(
                    LsrError, match="no one adapter 'third'; there are: 0 .*mine.gguf.*, 1 "
                ):
                    ask_server(url, adapter, name="third")
    assert alone[1] == alone[2] < second
    with (
        running(FakeLlama({"a": 1.0, "b": 1.0})) as url,
        pytest.raises(LsrError, match="2 adapters; say which by --served-as"),
    ):
        ask_server(url, adapter)
    with running(FakeLlama({})) as url, pytest.raises(LsrError, match="0 adapters; .*: none"):
        ask_server(url, adapter)


@pytest.mark.parametrize("plain", [False, True])
def test_openai_servers_have_an_adapter_as_a_model_of_its_own(adapter, plain):
    models = [{"id": "base", "parent": None}, {"id": "tuned", "parent": "base"}]
    with running(FakeOpenAi(models, plain)) as url:
        found = ask_server(url, adapter)
    assert (found.server, found.adapter, found.set_scale, found.acts) == (
        "OpenAI-compatible",
        "tuned",
        None,
        True,
    )
    with running(FakeOpenAi(models, plain, works=0.0)) as url:
        assert not ask_server(url, adapter, name="tuned").acts
    with running(FakeOpenAi(models[:1])) as url, pytest.raises(LsrError, match="names 1 models"):
        ask_server(url, adapter)


def test_a_scale_is_found_where_the_distance_is_least():
    for scale in (0.0, 0.03, 0.37, 1.0, 2.9, 16.0):
        found, left = fitted_scale(lambda s, scale=scale: abs(s - scale) + 0.05)
        assert found == pytest.approx(scale, abs=0.05 * max(scale, 1.0))
        assert left == pytest.approx(0.05, abs=0.05 * max(scale, 1.0))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny base with a tokenizer, and an adapter that moves it."""
    from tiny_language_model import make_base, make_lora

    folder = tmp_path_factory.mktemp("tiny")
    return make_base(folder), make_lora(folder)


class PeftServer:
    """llama.cpp's addresses, or OpenAI's with one model, in front of PEFT at a scale."""

    def __init__(self, base, adapter, works, *, openai=False):
        from lsrdecomp.lora.measure.ask import PROMPTS, ScaledModel

        self.model = ScaledModel(base, adapter, PROMPTS, "float32")
        self.works, self.openai = works, openai

    def likeliest(self, scale, tokens):
        self.model.tokens = [list(tokens)]
        (found,) = self.model.logprobs_at(scale)
        return {token: value for token, value in found.items() if isinstance(token, int)}

    def completion(self, scale, tokens, count):
        from tiny_tokenizer import word_tokenizer

        answer = []
        while len(answer) < count and answer[-1:] != [2]:  # the end of the text
            found = self.likeliest(scale, [*tokens, *answer])
            answer.append(max(found, key=found.get))
        return word_tokenizer().decode(answer, skip_special_tokens=True)

    def __call__(self, path, fields):
        if self.openai:
            return self.like_openai(path, fields)
        if path == "/lora-adapters":
            return 200, [{"id": 0, "path": "lora.gguf", "scale": 1.0}]
        scale = self.works if fields["lora"][0]["scale"] else 0.0
        if "n_probs" not in fields:
            return 200, {"content": self.completion(scale, fields["prompt"], fields["n_predict"])}
        found = self.likeliest(scale, fields["prompt"])
        top = [{"id": token, "logprob": value} for token, value in found.items()]
        return 200, {"completion_probabilities": [{"top_logprobs": top[:20]}]}

    def like_openai(self, path, fields):
        if path == "/v1/models":
            return 200, {"data": [{"id": "merged"}]}
        if path != "/v1/completions":
            return 404, {}
        if "logprobs" not in fields:
            text = self.completion(self.works, fields["prompt"], fields["max_tokens"])
            return 200, {"choices": [{"text": text}]}
        found = self.likeliest(self.works, fields["prompt"])
        top = {f"token_id:{token}": value for token, value in found.items()}
        return 200, {"choices": [{"logprobs": {"top_logprobs": [top]}}]}


@pytest.mark.parametrize("works", [1.0, 0.5, 0.0])
def test_the_scale_that_a_server_works_at_is_fitted_beside_peft(tiny, works, tmp_path):
    """The server is PEFT itself at a scale it does not tell."""
    from tiny_language_model import write_rows

    base, folder = tiny
    rows = write_rows(tmp_path / "rows.jsonl", 8)
    with running(PeftServer(base, folder, works)) as url:
        found = measure(folder, url, base=str(base), data=rows)
    server = found.server
    assert server.fitted_scale == pytest.approx(works, abs=0.02)
    assert server.fit < 1e-3
    assert (server.acts, server.scaled_right) == (works > 0.0, works == 1.0)
    assert found.kind == "server"
    verdicts = {1.0: "whole", 0.5: "damaged", 0.0: "gone"}
    assert found.verdict == verdicts[works], repr(found)
    codes = {1.0: [], 0.5: ["scale"], 0.0: ["not-acting"]}
    assert [reason.code for reason in found.reasons] == codes[works]
    assert found.passed(0.95) == (works == 1.0)
    if works == 1.0:
        assert found.fidelity.kept == pytest.approx(1.0, abs=1e-4)
        assert found.fidelity.n_matching == found.fidelity.answered == 8


@pytest.mark.parametrize("works", [1.0, 0.0])
def test_a_server_of_one_model_is_compared_with_a_base_here(tiny, works, tmp_path):
    """A merged model that is served; at scale 0 it is the base that is served."""
    from tiny_language_model import write_rows

    base, folder = tiny
    rows = write_rows(tmp_path / "rows.jsonl", 8)
    with running(PeftServer(base, folder, works, openai=True)) as url:
        arguments = ["measure", folder, url, "--base", base, "--data", rows, "--json", "-"]
        done = run_command(*arguments)
        with pytest.raises(LsrError, match="a model alone is compared with one here: give --base"):
            measure(folder, url)
    found = json.loads(done.stdout)
    assert done.returncode == (0 if works else 1), done.stderr
    assert found["verdict"] == ("whole" if works else "gone")
    assert found["server"] is None
    assert found["kept"] == pytest.approx(works, abs=1e-4)


def test_the_command_line_says_it_and_every_fault_is_one_line(adapter, tmp_path):
    with running(FakeLlama({"mine": 1.0})) as url:
        done = run_command("measure", adapter, url)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"llama.cpp at {url}: /here/mine.gguf acts." in done.stdout
        prompts = tmp_path / "prompts.txt"
        prompts.write_text("one\n\ntwo\n")
        assert "on 2 prompts" in run_command("measure", adapter, url, "--data", prompts).stdout
        with pytest.raises(
            CheckpointError, match="is no directory: the scale is fitted beside PEFT"
        ):
            ask_server(url, adapter, base=tmp_path)
        with pytest.raises(CheckpointError, match="no such file"):
            ask_server(url, tmp_path / "nowhere")
    with running(FakeLlama({"mine": 1.0}, works=0.0)) as url:
        done = run_command("measure", adapter, url)
        assert (done.returncode, done.stderr) == (1, "")
        assert "/here/mine.gguf does NOT act." in done.stdout
    for faulty, words in [
        (lambda path, fields: (200, b"<html>"), "not JSON"),
        (lambda path, fields: (500, {"error": "out of memory"}), "status 500"),
        (lambda path, fields: (404, {}), "status 404"),
        (lambda path, fields: (200, b"[" * 200_000), "not JSON"),
        (lambda path, fields: (200, b" " * (REPLY_BYTES + 1)), "answers more than"),
        (lambda path, fields: (500, b"\x1b]0;x\x07boom"), "status 500 ?]0;x?boom"),
    ]:
        with running(faulty) as url:
            done = run_command("measure", adapter, url)
        assert done.returncode == 2
        assert words in done.stderr
        assert done.stderr.count("\n") == 1

    class Silent(FakeLlama):
        def __call__(self, path, fields):
            return (
                (200, {"content": "x"}) if path == "/completion" else super().__call__(path, fields)
            )

    with (
        running(Silent({"mine": 1.0})) as url,
        pytest.raises(LsrError, match="no log-probabilities"),
    ):
        ask_server(url, adapter)
    for address, words in [
        ("file:///etc", "is no address"),
        ("http://127.0.0.1:9", "cannot be reached"),
    ]:
        done = run_command("measure", adapter, address)
        assert done.returncode == 2
        assert words in done.stderr
