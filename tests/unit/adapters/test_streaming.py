"""Streams by token: the calls of SGLang's streamer, and the order in which rows of its messages
leave."""

from __future__ import annotations

import asyncio
from array import array
from types import SimpleNamespace

import msgspec
import pytest
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import (
    BatchEmbeddingOutput,
    BatchStrOutput,
    unwrap_from_pickle,
    wrap_as_pickle,
)

from sglang_kvspec.adapters import round_times, streaming
from sglang_kvspec.adapters.streaming import PacedOutputs, stream_by_token


class Request(SimpleNamespace):
    """A request that is hashed by identity, as SGLang's requests are."""

    __hash__ = object.__hash__


def make_request(rid, num_new, *, sent=0, stream=True, interval=None, finished=False, cut=None):
    """Make a request whose last num_new output tokens have not been sent."""
    return Request(
        rid=rid,
        output_ids=list(range(sent + num_new)),
        send_token_offset=sent,
        stream=stream,
        finished_len=cut,
        spec_num_block_accept_tokens=0,
        sampling_params=SimpleNamespace(stream_interval=interval),
        finished=lambda: finished,
    )


class Streamer:
    """Stand-in for SGLang's stream_output, which records the tokens that each call would send."""

    def __init__(self, fail_at=None):
        self.calls = []
        self._fail_at = fail_at

    def __call__(self, reqs):
        if len(self.calls) == self._fail_at:
            raise RuntimeError("the socket is closed")
        sent = {}
        for req in reqs:
            shown = req.output_ids[: req.finished_len]
            sent[req.rid] = (shown[req.send_token_offset :], req.spec_num_block_accept_tokens)
            req.send_token_offset = len(shown)
        self.calls.append(sent)


def assert_restored(*reqs):
    for req in reqs:
        assert req.finished_len is None
        assert req.spec_num_block_accept_tokens == 0


def test_each_token_of_a_stream_is_sent_by_itself():
    stream, req = Streamer(), make_request("a", 3, sent=5)
    stream_by_token(stream, [req], 1)
    assert stream.calls == [{"a": ([5], 2)}, {"a": ([6], 1)}, {"a": ([7], 0)}]
    assert req.send_token_offset == 8
    assert_restored(req)


def test_streams_take_part_as_long_as_they_have_tokens():
    stream = Streamer()
    reqs = [make_request("a", 3), make_request("b", 1), make_request("c", 2, sent=4)]
    stream_by_token(stream, reqs, 1)
    assert stream.calls == [
        {"a": ([0], 2), "b": ([0], 0), "c": ([4], 1)},
        {"a": ([1], 1), "c": ([5], 0)},
        {"a": ([2], 0)},
    ]
    assert_restored(*reqs)


@pytest.mark.parametrize(
    "options",
    [{"finished": True}, {"stream": False}, {"interval": 2}, {"finished": True, "cut": 2}],
)
def test_other_requests_show_all_in_the_first_call(options):
    stream = Streamer()
    other = make_request("b", 4, **options)
    stream_by_token(stream, [make_request("a", 3), other], 1)
    assert stream.calls == [
        {"a": ([0], 2), "b": (list(range(options.get("cut", 4))), 0)},
        {"a": ([1], 1)},
        {"a": ([2], 0)},
    ]
    assert other.finished_len == options.get("cut")


@pytest.mark.parametrize(
    "reqs",
    [
        [],
        [make_request("a", 1)],
        [make_request("a", 0), make_request("b", 3, stream=False)],
        [make_request("a", 3, finished=True)],
    ],
)
def test_nothing_is_split_where_no_stream_has_two_tokens(reqs):
    calls = []
    stream_by_token(calls.append, reqs, 1)
    assert calls == [reqs]


@pytest.mark.parametrize(
    ("default", "own", "num_calls"), [(1, None, 3), (1, 0, 3), (8, 1, 3), (8, None, 1), (1, 4, 1)]
)
def test_a_stream_interval_is_left_to_sglang(default, own, num_calls):
    stream = Streamer()
    stream_by_token(stream, [make_request("a", 3, interval=own)], default)
    assert len(stream.calls) == num_calls


@pytest.mark.parametrize("fail_at", [0, 1, 2])
def test_requests_are_restored_when_the_streamer_raises(fail_at):
    reqs = [make_request("a", 3), make_request("b", 2)]
    with pytest.raises(RuntimeError, match="socket"):
        stream_by_token(Streamer(fail_at), reqs, 1)
    assert_restored(*reqs)


# Messages


def make_message(rids, *, following=None, finished=(), with_logprobs=False, number=0):
    """Make a message of the detokenizer. Every value names its request and the message."""

    def marked(field):
        return [f"{field} {rid} {number}" for rid in rids]

    lists = {}
    for name in BatchStrOutput.__struct_fields__:
        if "logprob" in name and "flat" not in name:
            lists[name] = [[value] for value in marked(name)] if with_logprobs else []
    fields = dict.fromkeys(BatchStrOutput.__struct_fields__)
    return BatchStrOutput(
        **{
            **fields,
            **lists,
            "rids": list(rids),
            "finished_reasons": [{"type": "stop"} if rid in finished else None for rid in rids],
            "output_strs": marked("text"),
            "output_ids": [array("q", [number, i]) for i in range(len(rids))],
            "prompt_tokens": list(range(len(rids))),
            "completion_tokens": [number] * len(rids),
            "reasoning_tokens": [0] * len(rids),
            "cached_tokens": [0] * len(rids),
            "spec_num_block_accept_tokens": [(following or {}).get(rid, 0) for rid in rids],
            "time_stats": wrap_as_pickle(marked("time")),
            "customized_info": wrap_as_pickle({"info": marked("info"), "more": marked("more")}),
        }
    )


@pytest.fixture(autouse=True, params=[True, False], ids=["pickled", "packed"])
def ipc(request, monkeypatch):
    """Test both formats in which SGLang's processes may send messages."""
    monkeypatch.setattr(io_struct, "_USE_PICKLE_IPC", request.param)


class SteppedLoop(asyncio.SelectorEventLoop):
    """Event loop whose time passes only where a test says so."""

    now = 1000.0

    def time(self):
        return self.now


def run(test):
    with asyncio.Runner(loop_factory=SteppedLoop) as runner:
        runner.run(test)


def pass_time(seconds):
    asyncio.get_running_loop().now += seconds


class Front:
    """Stand-in for TokenizerManager, with running requests and a record of the messages that it
    handles."""

    def __init__(self, streams=(), others=()):
        self.rid_to_state = {
            rid: SimpleNamespace(obj=SimpleNamespace(stream=rid in streams))
            for rid in (*streams, *others)
        }
        self.handled = []
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.paced = PacedOutputs.of(self, self.handle)

    async def handle(self, message):
        # Let other tasks run, as SGLang's own method does where it waits for a lock.
        await asyncio.sleep(0)
        await self.may_go_on.wait()
        self.handled.append(message)

    async def receive(self, *messages):
        for message in messages:
            await self.paced.receive(message)

    async def until(self, count):
        """Let time pass until the timer has delivered this many messages."""
        for _ in range(100):
            if len(self.handled) >= count:
                return
            pass_time(0.01)
            await asyncio.sleep(0)
        raise AssertionError(f"{len(self.handled)} of {count} messages have come")

    def texts(self):
        return [text for message in self.handled for text in message.output_strs]

    @property
    def num_streams(self):
        return self.paced._pacer.num_streams


def one_round(rid, first, num_tokens, **options):
    """Return the messages of one round, numbered from `first`."""
    return [
        make_message([rid], following={rid: num_tokens - 1 - i}, number=first + i, **options)
        for i in range(num_tokens)
    ]


async def begin(front, *rids):
    """Let the pacer see a round that took a tenth of a second."""
    await front.receive(make_message(rids, number=100))
    pass_time(0.1)


def test_one_object_serves_a_manager():
    async def play():
        front = Front()
        assert PacedOutputs.of(front, None) is front.paced

    run(play())


def test_messages_without_streams_are_delivered_unchanged():
    async def play():
        front = Front(others=["a", "b"])
        message = make_message(["a", "b"])
        embeddings = BatchEmbeddingOutput(**dict.fromkeys(BatchEmbeddingOutput.__struct_fields__))
        await front.receive(message, embeddings)
        assert front.handled[0] is message
        assert front.handled[1] is embeddings
        assert front.num_streams == 0

    run(play())


def test_a_message_that_leaves_whole_is_delivered_unchanged():
    async def play():
        front = Front(streams=["a"], others=["b"])
        message = make_message(["a", "b"])
        await front.receive(message)
        assert front.handled[0] is message

    run(play())


def test_a_round_is_delivered_token_by_token_in_order():
    async def play():
        front = Front(streams=["a"])
        await begin(front, "a")
        messages = one_round("a", 0, 4)
        await front.receive(*messages)
        assert front.texts() == ["text a 100", "text a 0"]
        await front.until(5)
        assert front.texts()[1:] == [f"text a {i}" for i in range(4)]
        assert 1000.2 < asyncio.get_running_loop().time() < 1000.25

    run(play())


def test_the_last_token_leaves_at_once_with_all_held_tokens():
    async def play():
        front = Front(streams=["a"])
        await begin(front, "a")
        await front.receive(*one_round("a", 0, 4), make_message(["a"], finished="a", number=9))
        assert front.texts()[1:] == [f"text a {i}" for i in (0, 1, 2, 3, 9)]
        assert front.num_streams == 0

    run(play())


@pytest.mark.parametrize("with_logprobs", [False, True])
def test_rows_of_a_message_keep_what_is_theirs(with_logprobs):
    async def play():
        front = Front(streams=["a"], others=["b", "c"])
        await begin(front, "a")
        await front.receive(make_message(["a", "b"], following={"a": 1}, number=1))
        both = make_message(["b", "a", "c"], with_logprobs=with_logprobs, number=2)
        await front.receive(both)
        now = front.handled[2]
        assert now.rids == ["b", "c"]
        await front.until(4)
        held = front.handled[3]
        assert held.rids == ["a"]
        for part, rows in ((now, [0, 2]), (held, [1])):
            assert_rows(part, both, rows)

    run(play())


def assert_rows(part, whole, rows):
    """Check that `part` equals `whole` in these rows, field by field."""
    fields = msgspec.structs.asdict(part)
    for name, value in msgspec.structs.asdict(whole).items():
        if name == "time_stats":
            wanted = [unwrap_from_pickle(value)[i] for i in rows]
            assert unwrap_from_pickle(fields[name]) == wanted
        elif name == "customized_info":
            info = unwrap_from_pickle(value)
            wanted = {key: [values[i] for i in rows] for key, values in info.items()}
            assert unwrap_from_pickle(fields[name]) == wanted
        elif value:
            assert fields[name] == [value[i] for i in rows], name
        else:
            assert fields[name] == value, name


def test_absent_pickles_stay_absent():
    async def play():
        front = Front(streams=["a"], others=["b"])
        await begin(front, "a")
        await front.receive(make_message(["a"], following={"a": 1}))
        message = make_message(["a", "b"])
        message.time_stats = message.customized_info = None
        await front.receive(message)
        await front.until(4)
        assert all(part.time_stats is None for part in front.handled[2:])
        assert all(part.customized_info is None for part in front.handled[2:])

    run(play())


def test_messages_without_counts_are_not_held():
    async def play():
        front = Front(streams=["a"])
        await begin(front, "a")
        message = make_message(["a"])
        message.spec_num_block_accept_tokens = None
        await front.receive(message, message)
        assert len(front.handled) == 3

    run(play())


def test_held_tokens_go_before_the_end_that_releases_them():
    async def play():
        front = Front(streams=["a"], others=["b"])
        await begin(front, "a")
        end = make_message(["b", "a"], finished="a", number=9)
        await front.receive(*one_round("a", 0, 4), end)
        assert front.texts()[1:] == [*(f"text a {i}" for i in range(4)), "text b 9", "text a 9"]

    run(play())


def test_a_round_waits_for_a_delivery_under_way():
    async def play():
        front = Front(streams=["a"])
        await begin(front, "a")
        await front.receive(*one_round("a", 0, 6))
        front.may_go_on.clear()
        pass_time(0.08)
        # The delivery of tokens 1 to 3 is under way while the next round releases 4 and 5.
        await give_way()
        following = asyncio.create_task(front.receive(*one_round("a", 6, 2)))
        await give_way()
        assert front.texts() == ["text a 100", "text a 0"]
        front.may_go_on.set()
        await following
        await front.receive(make_message(["a"], finished="a", number=8))
        assert front.texts()[1:] == [f"text a {i}" for i in range(9)]

    run(play())


async def give_way():
    """Let every other task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_tokens_of_a_request_that_is_gone_are_dropped():
    async def play():
        front = Front(streams=["a", "b"])
        await begin(front, "a", "b")
        await front.receive(*one_round("a", 0, 3), *one_round("b", 0, 3))
        del front.rid_to_state["a"]
        await front.until(5)
        assert [text for text in front.texts() if text.startswith("text a")] == [
            "text a 100",
            "text a 0",
        ]
        assert front.num_streams == 1

    run(play())


def test_the_last_message_of_a_request_that_is_gone_ends_its_stream():
    async def play():
        front = Front(streams=["a", "b"])
        await begin(front, "a", "b")
        await front.receive(*one_round("a", 0, 3))
        del front.rid_to_state["a"]
        last = make_message(["a"], finished="a")
        await front.receive(last)
        # SGLang's handler receives the message, and logs that it knows no such request.
        assert front.handled[-1] is last
        assert front.num_streams == 1
        assert front.paced._pacer.next_due() is None

    run(play())


def test_the_time_of_the_next_round_travels_with_every_token():
    stream, req = Streamer(), make_request("a", 2)
    round_times.note(req, 1.25)
    stream_by_token(stream, [req], 1)
    counters = [call["a"][1] for call in stream.calls]
    assert [streaming._unpacked(counter) for counter in counters] == [(1, 1.25), (0, 1.25)]
