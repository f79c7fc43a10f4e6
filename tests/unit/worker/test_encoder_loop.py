"""The encoder's loop over a toy encoder: who is computed when, and what a fault costs."""

from types import SimpleNamespace

import numpy as np
import pytest

from engine.core.interfaces.request import (
    Abort,
    Control,
    ControlReply,
    Deltas,
    GenerateRequest,
    SamplingParams,
    Stats,
    Stop,
)
from engine.worker.encoder_loop import EncoderLoop, EncoderSpec

SPEC = EncoderSpec(vocab_size=100, max_seq_len=8, num_dimensions=3)
BAD, NAN = 66, 77  # tokens that make the encoder raise, or compute nonsense


class ToyEncoder:
    """A text's vector is its sum, its length and one."""

    spec = SPEC

    def __init__(self):
        self.batches = []
        self.is_lost = False
        self.is_closed = False

    def encode(self, prompts, starts=None):
        self.batches.append(list(prompts))
        if self.is_lost or any(BAD in prompt for prompt in prompts):
            raise RuntimeError("out of luck")
        rows = [(np.nan if NAN in prompt else sum(prompt), len(prompt), 1) for prompt in prompts]
        return np.array(rows, np.float32)

    def close(self):
        self.is_closed = True


class ListChannel:
    def __init__(self):
        self.inbox = []
        self.sent = []

    def poll(self, timeout_s):
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message):
        self.sent.append(message)

    def answers(self):
        deltas = [m.deltas for m in self.sent if isinstance(m, Deltas)]
        return {delta.request_id: delta for group in deltas for delta in group}


@pytest.fixture
def encoder():
    return ToyEncoder()


@pytest.fixture
def channel():
    return ListChannel()


@pytest.fixture
def loop(encoder, channel):
    return EncoderLoop(encoder, channel, max_batch_tokens=6, max_queued=5)


def asking(name, *prompt, pools=True, **fields):
    params = fields.pop("params", SamplingParams())
    return GenerateRequest(request_id=name, prompt=prompt, params=params, pools=pools, **fields)


def vector(delta):
    return np.frombuffer(delta.vector, "<f4").tolist()


def test_each_request_gets_its_own_vector_once(loop, encoder, channel):
    channel.inbox = [asking("a", 1, 2), asking("b", 3), asking("c", 4, 5, 6)]
    loop.turn(0)
    answers = channel.answers()
    assert {name: vector(delta) for name, delta in answers.items()} == {
        "a": [3, 2, 1],
        "b": [3, 1, 1],
        "c": [15, 3, 1],
    }
    assert all(delta.finish_reason == "stop" for delta in answers.values())
    assert len(encoder.batches) == 1, "what fits together is computed together"
    stats = [message.stats for message in channel.sent if isinstance(message, Stats)]
    assert (stats[-1].prompt_tokens, stats[-1].num_steps, stats[-1].steps.tokens) == (6, 1, 6)


def test_encoder_batches_are_bounded_and_high_priorities_first(loop, encoder, channel):
    channel.inbox = [
        asking("a", 1, 1, 1, 1),
        asking("b", 2, 2, 2),
        asking("long", *[3] * 8),
        asking("now", 4, priority=-5),
    ]
    for _ in range(3):
        loop.turn(0)
    assert encoder.batches == [[(4,), (1, 1, 1, 1)], [(2, 2, 2)], [(3,) * 8]]


def test_one_bad_input_does_not_affect_other_embeddings(loop, encoder, channel):
    channel.inbox = [asking("a", 1), asking("bad", BAD), asking("b", 2), asking("nan", NAN)]
    loop.turn(0)
    answers = channel.answers()
    assert vector(answers["a"]) == [1, 1, 1] and vector(answers["b"]) == [2, 1, 1]
    for name in ("bad", "nan"):
        assert answers[name].finish_reason == "error"
        assert answers[name].error_code == "inference_error" and answers[name].vector is None
    assert loop.stats().num_nonfinite == 1


def test_an_encoder_that_always_fails_ends_the_engine(loop, encoder, channel):
    encoder.is_lost = True
    channel.inbox = [asking("a", 1)]
    with pytest.raises(RuntimeError):
        loop.turn(0)
    assert channel.answers()["a"].finish_reason == "error"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (asking("r", 1, pools=False, params=SamplingParams(n=2)), "embeddings"),
        (asking("r"), "no tokens"),
        (asking("r", 1, 100), "0..99"),
        (asking("r", 5, -1), "0..99"),
        (asking("r", *[1] * 9), "maximum context length is 8 tokens"),
    ],
)
def test_requests_that_an_encoder_cannot_serve_are_refused(
    loop, encoder, channel, request_, message
):
    channel.inbox = [request_]
    loop.turn(0)
    deltas = [delta for m in channel.sent if isinstance(m, Deltas) for delta in m.deltas]
    assert [delta.choice for delta in deltas] == list(range(request_.params.n))
    assert all(message in delta.error_message for delta in deltas)
    assert deltas[0].error_code == "invalid_request" and not encoder.batches


def test_the_encoders_queue_is_bounded(loop, channel):
    channel.inbox = [asking(str(i), 1) for i in range(7)]
    loop.turn(0)
    codes = [channel.answers()[str(i)].error_code for i in range(7)]
    assert codes == [None] * 5 + ["rate_limit_exceeded"] * 2


def test_expired_and_aborted_embeddings_are_not_computed(loop, encoder, channel):
    channel.inbox = [
        asking("late", 1, timeout_s=0.0),
        asking("waited", 4, queue_timeout_s=1e-9),
        asking("gone", 2),
        asking("kept", 3),
        Abort("gone"),
        Abort("unknown"),
    ]
    loop.turn(0)
    answers = channel.answers()
    assert answers["late"].error_code == "timeout"
    assert answers["waited"].error_code == "rate_limit_exceeded"
    assert answers["gone"].finish_reason == "abort"
    assert encoder.batches == [[(3,)]] and vector(answers["kept"]) == [3, 1, 1]


def test_control_messages_are_answered_and_stop_aborts_waiting_requests(loop, encoder, channel):
    channel.inbox = [
        Control(7, "flush_cache"),
        *(asking(str(i), *[1] * 6) for i in range(2)),
        Stop(),
    ]
    loop.run()
    assert ControlReply(7, True, "an encoder keeps no cache") in channel.sent
    reasons = [channel.answers()[str(i)].finish_reason for i in range(2)]
    assert reasons == ["stop", "abort"] and encoder.is_closed


def test_the_heartbeat_reports_busy_before_encoding_starts(encoder, channel):
    beats = []
    encode = encoder.encode
    encoder.encode = lambda prompts, starts=None: beats.append("encode") or encode(prompts)
    beat = SimpleNamespace(
        beat=lambda busy, step_timeout_s: beats.append(busy), watch=lambda loop: None
    )
    loop = EncoderLoop(encoder, channel, 6, 5, pulse=beat)
    channel.inbox = [asking("a", 1)]
    loop.turn(0)
    loop.turn(0)
    assert beats == [False, True, "encode", False]


@pytest.mark.parametrize("token", [1, BAD])
def test_only_a_batch_in_computation_may_be_interrupted(loop, encoder, channel, token):
    seen, encode = [], encoder.encode
    encoder.encode = lambda prompts, starts=None: seen.append(loop.is_computing) or encode(prompts)
    channel.inbox = [asking("a", token), asking("b", 2)]
    loop.turn(0)
    assert seen[:1] == [True] and not loop.is_computing


def test_a_flood_of_one_tenant_delays_another_by_one_batch_only(loop, encoder, channel):
    flood = [asking(f"a{i}", 1, 1, 1, tenant="flood", priority=-9) for i in range(4)]
    channel.inbox = [*flood, asking("b", 2, tenant="other")]
    for _ in range(4):
        loop.turn(0)
    assert encoder.batches[0] == [(1, 1, 1), (2,)]


def test_a_queue_full_of_one_tenant_still_admits_another(loop, channel):
    channel.inbox = [asking(f"a{i}", 1, tenant="flood") for i in range(6)]
    channel.inbox.append(asking("b", 2, tenant="other"))
    loop.turn(0)
    refused = [name for name, delta in channel.answers().items() if delta.error_code]
    assert refused == ["a4", "a5"]
