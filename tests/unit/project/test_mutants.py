"""The generated mistakes of `make mutants`: each operator makes those that it is for."""

import ast
from pathlib import Path

import pytest

from tests.teeth.blocks import MARKS_OF, block_of_nodes, blocks, with_marks
from tests.teeth.operators import OPERATORS, mutants_of

MISTAKES = {
    "dropped_owner": ('db.run("id = ? AND owner = ?")', "db.run('id = ? AND (owner = ? OR TRUE)')"),
    "wrong_index": ("row = states[slot]", "row = states[row]"),
    "dropped_field": ("return replace(a, b=1)", "return replace(a)"),
    "missing_in_key": ("key = (a, salt)", "key = (a, )"),
    "off_by_one": ("return -(-a // b)", "return (a // b)"),
    "wrong_unit": ("return a * block_size", "return (a)"),
    "dropped_call": ("await pool.release(a)", "pass"),
    "kept_state": ("self.num_free -= 1", "pass"),
    "swapped_arguments": ("f(num_a, num_b)", "f(num_b, num_a)"),
    "moved_boundary": ("return a < b", "return a <= b"),
    "negated_condition": ("return 1 if a is None else 2", "return 1 if a is not None else 2"),
    "dropped_condition": ("return a and b", "return ((b))"),
    "dropped_filter": ("return [a for a in b if a.owner]", "return [a for a in b if True]"),
    "swallowed_error": ("raise ValueError", "pass"),
    "wrong_default": ("return a.get(b, 1)", "return a.get(b, 0)"),
    "wrong_answer": ("return False", "return True"),
}


def test_there_is_an_example_of_each_operator() -> None:
    assert [each.__name__ for each in OPERATORS] == [*MISTAKES]


@pytest.mark.parametrize("name", MISTAKES)
def test_an_operator_makes_its_mistake(name: str, tmp_path: Path) -> None:
    right, wrong = MISTAKES[name]
    start = f"async def f():\n    log.info({right!r})\n    assert {right!r}\n    "
    file = tmp_path / "module.py"
    file.write_text(start + right)
    found = [each for each in mutants_of("module", file) if each.operator == name]
    source = file.read_bytes()
    made = [source[: each.start] + each.wrong.encode() + source[each.end :] for each in found]
    assert (start + wrong).encode() in made
    assert all(each.line == 4 for each in found), "a line that logs or asserts"
    for each in made:
        ast.parse(each)


SOURCE = '''
def one(a):
    """Says."""
    if not a:
        return a
    for each in a:
        break
    return [each]

class Two:
    async def three(self):
        with self:
            def four():
                return 4
        return four()
'''


def test_blocks_end_where_a_function_may_be_left_and_mark_that_they_were_reached() -> None:
    tree = ast.parse(SOURCE)
    numbers = block_of_nodes(tree)
    of_lines = {node.lineno: number for node, number in numbers.items() if hasattr(node, "lineno")}
    assert len({of_lines[line] for line in (4, 5, 6, 7, 8)}) == 5
    assert of_lines[12] == of_lines[13] != of_lines[14], "a function in it runs later"
    names = [each.function for each in blocks(tree)]
    count = with_marks(tree, "module")
    assert count == len(names) and names[-1].startswith("Two.three")
    marks = bytearray(count)
    space = {MARKS_OF: lambda module: marks}
    exec(compile(tree, "", "exec"), space)
    assert space["one"].__doc__ == "Says."  # type: ignore[attr-defined]
    space["one"]((1,))  # type: ignore[operator]
    reached = [number for number, mark in enumerate(marks) if mark]
    assert reached == sorted({of_lines[line] for line in (4, 6, 7, 8)})
