"""The progress of a batch of prompts that bench_profile.py waits for."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue
from typing import Any

import pytest
from serving.client import BenchError
from serving.points import Model, Point
from serving.profiled_run import find_trace, iteration_ms, make_prompts
from serving.stream import Progress, Stream

PROMPTS = [[1, 2, 3], [4, 5]]
END = object()


class Server:
    """Server that answers /generate with the chunks that a test gives it, until END or an abort."""

    def __init__(self) -> None:
        self.chunks: SimpleQueue[Any] = SimpleQueue()
        self.bodies: list[dict[str, Any]] = []
        self.aborted = threading.Event()
        self.status = 200
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                body = json.loads(self.rfile.read(length))
                if self.path == "/abort_request":
                    owner.aborted.set()
                    owner.chunks.put(END)
                    self.send_response(200)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                owner.bodies.append(body)
                self.send_response(owner.status)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                while owner.status == 200 and (chunk := owner.chunks.get()) is not END:
                    self.write(f"data: {json.dumps(chunk)}\n\n".encode())
                self.write(b"")

            def write(self, part: bytes) -> None:
                """Write a chunk; an empty one ends the answer."""
                self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,))
        self._thread.start()

    def send(self, index: int, tokens: int, finish: dict[str, str] | None = None) -> None:
        meta = {"completion_tokens": tokens, "finish_reason": finish}
        self.chunks.put({"index": index, "text": "x", "meta_info": meta})

    def close(self) -> None:
        self.chunks.put(END)
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def stream(server: Server, timeout_s: float = 20) -> Stream:
    return Stream(server.url, PROMPTS, 100, timeout_s)


def test_waits_for_the_slowest_answer(server):
    with stream(server) as answers:
        server.send(0, 1)
        server.send(0, 5)
        server.send(1, 1)
        answers.wait_chunks(1)
        server.send(0, 9)
        server.send(1, 4)
        answers.wait_chunks(1)
        assert [(a.tokens, len(a.times)) for a in answers.progress()] == [(9, 3), (4, 2)]
    assert server.aborted.is_set()
    assert server.bodies[0]["input_ids"] == PROMPTS
    assert server.bodies[0]["sampling_params"]["max_new_tokens"] == 100
    assert server.bodies[0]["sampling_params"]["ignore_eos"]


def test_does_not_continue_before_every_answer_has_grown(server):
    with stream(server, timeout_s=0.3) as answers:
        server.send(0, 1)
        server.send(0, 2)
        with pytest.raises(BenchError, match="timed out after 0 s, waiting for 2 more chunks"):
            answers.wait_chunks(2)


def test_an_answer_that_ends_too_early_is_an_error(server):
    with stream(server) as answers:
        server.send(0, 1)
        server.send(1, 100, {"type": "length"})
        with pytest.raises(BenchError, match=r"ended after 100 tokens.* raise --output-len"):
            answers.wait_chunks(2)


def test_complete_answers_need_no_abort(server):
    with stream(server) as answers:
        server.send(0, 1, {"type": "length"})
        server.send(1, 1, {"type": "length"})
        answers.wait_end()
        server.chunks.put(END)
    assert not server.aborted.is_set()


def test_a_closed_connection_is_an_error(server):
    with stream(server) as answers:
        server.send(0, 1)
        server.chunks.put(END)
        with pytest.raises(BenchError, match="the server closed the connection"):
            answers.wait_end()


def test_a_refusal_is_an_error(server):
    server.status = 500
    with stream(server) as answers, pytest.raises(BenchError, match="/generate answered 500"):
        answers.wait_end()


def test_a_request_that_the_server_aborts_is_an_error(server):
    with stream(server) as answers:
        server.send(0, 7, {"type": "abort", "message": "out of memory"})
        with pytest.raises(BenchError, match="aborted a request: out of memory"):
            answers.wait_end()


def test_an_error_chunk_is_an_error(server):
    with stream(server) as answers:
        server.chunks.put({"error": {"message": "too long"}})
        with pytest.raises(BenchError, match="too long"):
            answers.wait_chunks(1)


def test_iterations_are_timed_after_the_first_chunk():
    # The time between the first two chunks of an answer contains the prefill of others.
    answers = [Progress(times=[0, 5, 5.02, 5.04, 5.07]), Progress(times=[4, 5, 5.02, 5.05])]
    assert iteration_ms(answers) == pytest.approx(20)


def test_prompts_are_the_same_for_every_system_and_differ_by_point():
    model = Model.find("8b")
    made = make_prompts(Point(model, 64, 3), 64, text=False)
    assert [len(prompt) for prompt in made] == [64] * 3
    assert made == make_prompts(Point(model, 64, 3), 64, text=False)
    assert made[0] != made[1]
    assert made[0] != make_prompts(Point(model, 64, 2), 64, text=False)[0]


def test_the_first_ranks_trace_is_found(tmp_path):
    with pytest.raises(BenchError, match=r"should have written one trace.*found nothing"):
        find_trace(tmp_path)
    for rank in (0, 1):
        (tmp_path / f"profile-TP-{rank}.trace.json.gz").touch()
    assert find_trace(tmp_path).name == "profile-TP-0.trace.json.gz"
