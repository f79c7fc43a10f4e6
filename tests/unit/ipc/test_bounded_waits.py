"""Every wait of a process that supervises others has a bound, or a reason why it needs none.

A wait without a bound is one that a frozen process can make last for ever. The test reads the
syntax trees of all modules that start, watch or end processes.
"""

import ast
from collections.abc import Iterator

from engine_tools.source_trees import ROOT, SourceFile, sources

SUPERVISORS = (
    "engine.ipc.child_process",
    "engine.ipc.engine_process",
    "engine.ipc.connection",
    "engine.frontend.engine_link",
    "engine.torch.execution.distributed.group",
    "engine.torch.execution.distributed.remote",
    "engine.backends.external",
    "engine.core.grammar.checker",
    "engine.core.sandbox",
    "engine.finetuning.process",
    "engine.plugins.host",
    "engine.routing.nodes",
    "engine.routing.ray_nodes",
    "engine.servers.storage.job_queue",
    "engine.servers.fine_tuning.runner",
    "engine.servers.http_workers.pool",
    "engine.servers.http_workers.worker",
)
# Calls that wait until something happens, unless they get a timeout.
WAITS = ("wait", "join", "communicate", "acquire", "waitpid")
BOUNDS = ("wait_for", "answer_of", "timeout")
# Waits without a bound of their own: the function, and what ends the wait.
ENDED_BY = {
    "ipc.connection.ProcessClient._end": "the liveness monitor: `kill` closes it",
    "frontend.engine_link.EngineLink.start": "the liveness monitor, and the bound of a load",
    "backends.external.external_child.ExternalChild._report": "`stop`, which kills the launcher",
    "backends.external.supervisor.Supervisor._unless_ended": "it is done, or has failed",
    "core.grammar.checker.GrammarChecker.close": "the cancellation of the line before",
    "plugins.host._run": "the timeout of the hook, which the caller sets",
    "routing.nodes.agent.NodeAgent.run": "the user: a node stays until it is told to leave",
    "routing.nodes.agent.NodeAgent._stay": "the watch of the connection, after three seconds",
    "routing.nodes.dial._ask": "the timeout of the greeting, in `_open`",
    "routing.ray_nodes.actors.NodeProcess._run": "the node, which watches its own engine",
    "servers.storage.job_queue.JobQueue.holds": "nobody waits: a lock that is taken is False",
}


def waits(source: SourceFile) -> Iterator[tuple[str, int]]:
    """The name of the function and the line of each wait that has no bound."""
    yield from _waits_in(source.tree, source.module, is_bounded=False)


def _waits_in(node: ast.AST, name: str, is_bounded: bool) -> Iterator[tuple[str, int]]:
    for child in ast.iter_child_nodes(node):
        inner, bounded = name, is_bounded
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner, bounded = f"{name}.{child.name}", False
        elif isinstance(child, ast.Call) and _last(child.func) in BOUNDS:
            bounded = True
        elif isinstance(child, ast.AsyncWith):
            bounded = is_bounded or any(
                isinstance(each.context_expr, ast.Call) and _last(each.context_expr.func) in BOUNDS
                for each in child.items
            )
        if _waits(child) and not bounded:
            yield inner, child.lineno
        yield from _waits_in(child, inner, bounded)


def _waits(node: ast.AST) -> bool:
    if isinstance(node, ast.Await):  # of a future
        return isinstance(node.value, ast.Name | ast.Attribute)
    return (
        isinstance(node, ast.Call)
        and _last(node.func) in WAITS
        and isinstance(node.func, ast.Attribute)
        and not node.args
        and not node.keywords
    )


def _last(function: ast.expr) -> str:
    """`c` of `a.b.c` and of `c`."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def test_every_wait_of_a_supervisor_has_a_bound():
    watching = [each for each in sources() if each.module.startswith(SUPERVISORS)]
    found = {
        name.removeprefix("engine."): f"{source.path.name}:{line}"
        for source in watching
        for name, line in waits(source)
    }
    new = {name: place for name, place in found.items() if name not in ENDED_BY}
    assert not new, "give these waits a bound, or say what ends them"
    assert set(found) == set(ENDED_BY), "some of these waits are gone"


def test_the_checker_finds_unbounded_waits():
    text = """
async def unbounded(process, event, future):
    process.wait()
    await event.wait()
    await future

async def bounded(process, event):
    process.wait(5)
    await asyncio.wait_for(event.wait(), 5)
    async with asyncio.timeout(5):
        await event.wait()
"""
    assert [line for _, line in waits(SourceFile(ROOT / "m.py", text))] == [3, 4, 5]
