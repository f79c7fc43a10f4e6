"""Nodes that join a server: placement, loss, return, and what is refused."""

import asyncio
import contextlib
import math
import os
import signal
import threading

import msgspec
import pytest
from msgspec import structs

from engine.core.errors import AuthenticationError, ConflictError, EngineError, UnavailableError
from engine.core.interfaces.request import (
    AdapterRef,
    CachedPrefixes,
    ControlReply,
    Deltas,
    GenerateRequest,
    Ready,
    SamplingParams,
    TokenDelta,
)
from engine.core.interfaces.stats import EngineStats, StepCounts, TierStats
from engine.core.prefix_hashes import prompt_hashes
from engine.ipc.connection import Connection
from engine.ipc.transport import encode_frame
from engine.routing.nodes import agent as agent_module
from engine.routing.nodes import manager as manager_module
from engine.routing.nodes import node as node_module
from engine.routing.nodes import proofs
from engine.routing.nodes.agent import JoinRefusedError
from engine.routing.nodes.dial import check, dial, endpoint_of, read_token
from engine.routing.nodes.manager import EJECTED_AFTER_S, NodeManager
from engine.routing.nodes.pool import LOCAL
from engine.routing.nodes.wire import MAX_UNSENT_BYTES, Beat, Hello, Name, ToNode
from tests.support.servers.node_cluster import TOKEN, NoEngine, node, routed, until
from tests.support.toy_engine.runner import VOCAB


def prompt(number: int, length: int = 12) -> tuple[int, ...]:
    return tuple((number * 7 + each * each) % 20 for each in range(length))


async def alone(prompts, **fields) -> list[str]:
    async with routed() as server:
        asked = (server.ask(each, **fields) for each in prompts)
        return [text for text, _ in await asyncio.gather(*asked)]


async def test_a_node_serves_requests_with_the_same_answers_as_the_server() -> None:
    prompts = [prompt(number) for number in range(12)]
    expected = await alone(prompts)
    async with routed() as server, node(server):
        answers = await asyncio.gather(*map(server.ask, prompts))
        assert [text for text, _ in answers] == expected
        placed = {name for _, name, _ in server.pool.decisions}
        assert placed == {LOCAL, "node"}


async def test_sampling_choices_logprobs_and_stop_tokens_cross_the_wire() -> None:
    fields = {"temperature": 1.0, "seed": 5, "n": 2, "logprobs": 3, "stop_token_ids": (3,)}
    expected = await alone([prompt(1)], **fields)
    async with routed(NoEngine()) as server, node(server):
        assert [(await server.ask(prompt(1), **fields))[0]] == expected


async def test_requests_go_to_the_node_that_cached_their_prefix() -> None:
    async with (
        routed(NoEngine()) as server,
        node(server, name="a", block_size=16),
        node(server, name="b", block_size=16),
    ):
        await server.joined("a", "b")
        # So many that idle nodes, which are equal, each get some. One node has room for all.
        tenants = "klmnopqrstuvwxyz"
        for turn in range(2):
            for tenant in tenants:
                text, usage = await server.ask(prompt(ord(tenant), 140), salt=tenant)
                assert usage.cached_tokens == (0 if turn == 0 else 128), (turn, tenant)
        last = range(server.num_asked, server.num_asked - len(tenants), -1)
        assert {server.pool._placed[f"r{number}"] for number in last} == {"a", "b"}


async def test_requests_for_an_adapter_go_to_nodes_that_have_its_files() -> None:
    async with routed() as server, node(server):

        def placed(adapter: AdapterRef | None) -> set[str]:
            requests = (
                GenerateRequest(
                    request_id="r", prompt=prompt(each), params=SamplingParams(), adapter=adapter
                )
                for each in range(40)
            )
            return {server.pool._choose(each)[0].name for each in requests}

        assert placed(None) == {LOCAL, "node"}
        assert placed(AdapterRef("key", "/only/here")) == {LOCAL}


async def test_the_routing_table_follows_the_nodes_cached_blocks() -> None:
    async with routed(NoEngine()) as server, node(server):
        engine = server.pool.engines["node"]
        await server.ask(prompt(1, 140), salt="s")
        wanted = prompt_hashes("s", prompt(1, 140))
        assert len(wanted) == 2
        table = server.pool.router.table
        await until(lambda: all(table.has(engine.number, each) for each in wanted))
        await server.backend.flush_prefixes()
        await until(lambda: table.count(engine.number) == 0)


async def test_no_request_fails_when_a_node_is_lost() -> None:
    prompts = [prompt(number, 6) for number in range(64)]  # eight times the slots of an engine
    expected = await alone(prompts, max_tokens=40)
    async with routed() as server, node(server, name="a"), node(server, name="b") as lost:
        await server.joined("a", "b")
        asked = [asyncio.create_task(server.ask(each, max_tokens=40)) for each in prompts]
        await until(lambda: server.pool.engines["b"].load > 5)
        await asyncio.sleep(0.1)
        os.kill(lost._link.pid, signal.SIGKILL)
        answers = await asyncio.gather(*asked)
        assert [text for text, _ in answers] == expected
        assert any(usage.num_revivals for _, usage in answers)
        await server.joined("a", "b")  # its engine was restarted, and it is back


async def test_a_silent_node_is_ejected_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with routed() as server, node(server):
        engine, loop = server.pool.engines["node"], asyncio.get_running_loop()
        monkeypatch.setattr(agent_module, "BEAT_S", EJECTED_AFTER_S + 0.5)  # from the next beat on
        began = loop.time()
        await until(lambda: engine.state == "ejected")
        assert loop.time() - began < 10.0  # and not only when its connection is given up
        await server.ask(prompt(1))
        assert server.pool.decisions[-1][1] == LOCAL
        await until(lambda: engine.state == "ready")


async def test_a_node_that_does_not_read_ends_only_its_own_connection() -> None:
    """The next beat finds its buffer full. The manager goes on to watch all nodes."""
    async with routed() as server, node(server, name="a"), node(server, name="b"):
        await server.joined("a", "b")
        (full,) = [each for each in server.manager._connected if each.engine.name == "a"]
        full.connection.transport.get_write_buffer_size = lambda: 2 * MAX_UNSENT_BYTES
        await until(lambda: full not in server.manager._connected)
        await server.joined("a", "b")
        assert not server.manager._watching.done()


HOSTILE = {
    "deltas of nobody": Deltas(tuple(TokenDelta(f"x{each}", 0, (1,)) for each in range(50_000))),
    "a choice that is not there": Deltas((TokenDelta("x", 2**40, (1,), finish_reason="stop"),)),
    "a token that is not there": Deltas((TokenDelta("x", 0, (2**40, -(2**40))),)),
    "many deltas at once": Deltas((TokenDelta("x", 0, (), num_processed=1),) * 50_000),
    "too many prefixes": CachedPrefixes(added=tuple(range(node_module.MAX_PREFIXES + 1))),
    "a reply to nothing": ControlReply(2**40, True, "x" * 1_000_000),
    "a second hello": None,
    "stats": Beat(EngineStats(num_free_blocks=-(2**60))),
}


@pytest.mark.parametrize("kind", HOSTILE)
async def test_hostile_messages_of_a_node_do_not_affect_requests_of_other_nodes(kind: str) -> None:
    """Requests of another node go on. Those of the hostile node end, whatever their answer is."""
    prompts = [prompt(number, 6) for number in range(8)]
    expected = await alone(prompts, max_tokens=40)
    async with routed(NoEngine()) as server, node(server, name="good"), node(server) as bad:
        await server.joined("good", "node")
        asked = [asyncio.create_task(server.ask(each, max_tokens=40)) for each in prompts]
        await until(lambda: len(server.pool._placed) == len(prompts))
        await until(lambda: bad._sessions)
        (session,) = bad._sessions
        message = HOSTILE[kind] or bad._identity.hello(bad._link.ready, None)
        placed = dict(server.pool._placed)
        if isinstance(message, Deltas):
            aimed = [
                structs.replace(each, request_id=request_id)
                for request_id in placed
                for each in message.deltas[:1000]
            ]
            message = Deltas((*message.deltas, *aimed))
        session.connection.send(message)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for place, answer, right in zip(placed.values(), answers, expected, strict=True):
            assert place == "node" or answer[0] == right
        await server.joined("good", "node")  # it may have been dropped, and come back


UNSOUND = {
    "a negative number": EngineStats(num_free_blocks=-1),
    "a histogram of another length": EngineStats(steps=StepCounts(by_seconds=(1,))),
    "a negative bucket": EngineStats(steps=StepCounts(by_tokens=(-1,) + (0,) * 15)),
    "no number": EngineStats(steps=StepCounts(seconds=math.nan)),
    "many tiers": EngineStats(tiers=(TierStats(name="x"),) * 1000),
    "a long name": EngineStats(tiers=(TierStats(name="x" * 1000),)),
    "infinite seconds": EngineStats(tiers=(TierStats(name="x", load_s=math.inf),)),
}


@pytest.mark.parametrize("kind", UNSOUND)
async def test_a_node_with_impossible_statistics_is_disconnected(kind: str) -> None:
    """They would stay in the totals of the server, or hold up the requests of the lost node."""
    assert EngineStats().is_sound
    async with routed(NoEngine()) as server, node(server) as bad:
        await until(lambda: bad._sessions)
        (session,) = bad._sessions
        session.connection.send(Beat(UNSOUND[kind]))
        await until(lambda: session.closed.is_set())
        await server.joined("node")
        (expected,) = await alone([prompt(1)])
        assert (await server.ask(prompt(1)))[0] == expected
        assert server.pool.stats is None or server.pool.stats.is_sound


@pytest.mark.parametrize("tokens", [(1, -1), (1, VOCAB), (1, 2**31), (1,) * 41], ids=str)
async def test_a_node_that_sends_impossible_tokens_is_dropped(
    tokens: tuple[int, ...],
) -> None:
    """The node that sent it is dropped, and its requests go on elsewhere."""
    (expected,) = await alone([prompt(1)], max_tokens=40)
    async with routed(NoEngine()) as server, node(server) as bad:
        asked = asyncio.create_task(server.ask(prompt(1), max_tokens=40, request_id="r"))
        await until(lambda: "r" in server.pool._placed and bad._sessions)
        (session,) = bad._sessions
        session.connection.send(Deltas(tuple(TokenDelta("r", 0, (each,)) for each in tokens)))
        text, _ = await asked
        assert text == expected


async def test_a_node_with_a_longer_context_than_the_model_is_refused() -> None:
    async with routed(NoEngine()) as server:
        longer = structs.replace(await ready_of_toy(), max_seq_len=2**40)
        hello = Hello(node_id="n", name="n", model="", model_name="", fingerprint="", ready=longer)
        with pytest.raises(ConflictError, match="longest context of the model"):
            server.manager._check_context(server.backend, server.pool, hello)


async def test_a_node_refuses_control_messages_about_its_own_machine() -> None:
    async with routed(NoEngine()) as server, node(server):
        link = server.pool.engines["node"].link
        for action in ("load_adapter", "serve_blocks", "log_level"):
            reply = await link.control(action, "/etc/passwd")
            assert not reply.ok and "for a server" in reply.message
        assert (await link.control("flush_cache")).ok


async def test_a_node_with_a_wrong_token_or_an_invalid_name_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with routed(NoEngine()) as server:
        for token in ("", "wrong", "\xff" * 20, "x" * 4000):
            with pytest.raises(AuthenticationError):
                await check(endpoint_of(server.url, token))
        assert not server.manager._connected
        monkeypatch.setattr(manager_module, "MAX_NODES", 0)
        with pytest.raises(UnavailableError, match="0 nodes already"):
            await dial(endpoint_of(server.url, TOKEN), Connection(ToNode, print, print))
    for name in ("x" * 2000, "a\nb", "\x1b[2J"):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(name, Name)


async def test_node_and_server_prove_their_token_without_sending_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A proof of another time, or of another connection, is worth nothing. Nor is a frame that
    somebody in between has changed.
    """
    sent: list[bytes] = []
    upgrade = NodeManager.upgrade

    def noted(self, headers, transport) -> None:
        sent.extend(value for _, value in headers)
        upgrade(self, headers, transport)

    monkeypatch.setattr(NodeManager, "upgrade", noted)
    async with routed(NoEngine()) as server, node(server) as agent:
        await server.joined("node")
        assert TOKEN.encode() not in b" ".join(sent)
        proof = next(each for each in sent if each.startswith(b"Proof "))
        assert server.manager.takes([(b"authorization", proof)])[0].startswith("409")  # no build
        monkeypatch.setattr(proofs, "CHALLENGE_S", -1.0)
        assert server.manager.takes([(b"authorization", proof)])[0].startswith("401")
        monkeypatch.setattr(proofs, "CHALLENGE_S", 10.0)
        for junk in (b"", b"Proof", b"Proof a b c", b"Proof \xff \xfe \xfd", b"Proof 1-2 a b c d"):
            assert server.manager.takes([(b"authorization", junk)])[0].startswith("401")
        await until(lambda: agent._sessions)
        (session,) = agent._sessions
        write = session.connection.transport.write
        write(encode_frame(Beat()) + bytes(32))  # somebody in between adds a message
        await until(lambda: session.closed.is_set())
        await server.joined("node")


async def test_requests_wait_for_the_first_node() -> None:
    async with routed(NoEngine()) as server:
        server.pool.expected = await ready_of_toy()
        waiting = asyncio.create_task(server.ask(prompt(3)))
        await until(lambda: server.pool.num_open == 1)
        assert not waiting.done()
        async with node(server):
            assert (await waiting)[0] == (await alone([prompt(3)]))[0]


async def ready_of_toy() -> Ready:
    async with routed() as server:
        assert server.backend.ready is not None
        return server.backend.ready


async def test_a_node_can_serve_two_servers() -> None:
    async with routed() as one, routed() as two, node(one, two):
        texts = await asyncio.gather(
            *(
                server.ask(prompt(each), request_id=f"same{each}")
                for server in (one, two)
                for each in range(8)
            )
        )
        assert [text for text, _ in texts[:8]] == [text for text, _ in texts[8:]]
        assert one.pool.engines["node"].num_requests and two.pool.engines["node"].num_requests


async def test_a_leaving_node_finishes_its_requests() -> None:
    async with routed() as server, node(server) as leaving:
        asked = [asyncio.create_task(server.ask(prompt(each), max_tokens=40)) for each in range(12)]
        await until(lambda: server.pool.engines["node"].load > 2)
        server.manager.drain("node")
        answers = await asyncio.gather(*asked)
        assert leaving.is_leaving and not any(usage.num_revivals for _, usage in answers)
        await until(lambda: not server.names)
        with pytest.raises(EngineError, match="no node nobody"):
            server.manager.drain("nobody")


async def test_a_node_that_disconnects_during_its_check_is_not_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked, digest = threading.Event(), manager_module.model_digest

    def slow_digest(path) -> str:
        assert checked.wait(60)
        return digest(path)

    monkeypatch.setattr(manager_module, "model_digest", slow_digest)
    async with routed() as server:
        try:
            async with node(server, wait=False):
                await until(lambda: server.manager._tasks)
            await until(lambda: not server.manager._connected)
        finally:
            checked.set()
        await until(lambda: not server.manager._tasks)
        assert server.manager.discover() == []


async def refusal(server, **fields) -> EngineError:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(60), node(server, **fields):
            pass
    raise AssertionError("the node was not refused")


async def test_nodes_with_a_wrong_token_or_another_model_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    async with routed() as server:
        with pytest.raises(AuthenticationError, match=r"token is not the server's"):
            await refusal(server, token="another-token-of-somebody")
        (tmp_path / "model.gguf").write_bytes(b"other")
        with pytest.raises(JoinRefusedError, match="and the server serves toy"):
            await refusal(server, model_path=str(tmp_path / "model.gguf"))
        with monkeypatch.context() as patch:
            patch.setattr("engine.routing.nodes.dial.node_build", lambda: "0.0.1+1234abcd")
            with pytest.raises(
                ConflictError, match=r"runs engine 0\.0\.1\+1234abcd, and the server"
            ):
                await refusal(server)
        assert (await server.ask(prompt(1)))[0] == (await alone([prompt(1)]))[0]


def test_the_token_file_must_be_private(tmp_path) -> None:
    path = tmp_path / "token"
    path.write_text("0123456789abcdef\n")
    path.chmod(0o600)
    assert read_token(path) == "0123456789abcdef"
    path.chmod(0o640)
    with pytest.raises(EngineError, match="other users can read .* chmod 600"):
        read_token(path)
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(EngineError, match="shorter than 16"):
        read_token(path)
    with pytest.raises(EngineError, match="is no address"):
        endpoint_of("server:80", "token")


async def test_a_server_without_nodes_refuses_with_advice() -> None:
    async with routed(NoEngine()) as server:
        with pytest.raises(UnavailableError, match="engine node join"):
            await server.ask(prompt(1))
