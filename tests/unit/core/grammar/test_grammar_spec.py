"""What clients send as the text of a grammar: regular expressions, choices, Lark and GBNF."""

import json
import subprocess
import sys

import pytest

from engine.core.errors import InvalidRequestError
from engine.core.grammar.child import byte_tokenizer, problem_of
from engine.core.grammar.regex_dialect import MAX_REPEAT, RegexError, translate
from engine.core.grammar.spec import MAX_SOURCE_BYTES, grammar_text
from engine.core.interfaces.backend import GrammarSpec


def accepts(kind: str, source: str, text: str) -> bool:
    from llguidance import LLMatcher

    grammar = grammar_text(GrammarSpec(kind=kind, source=source, param="it"))
    tokenizer = byte_tokenizer()
    assert problem_of(grammar, tokenizer) is None
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def refusal(kind: str, source: str) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        grammar_text(GrammarSpec(kind=kind, source=source, param="it"))
    assert caught.value.param == "it"
    return caught.value.message


@pytest.mark.parametrize(
    ("pattern", "valid", "invalid"),
    [
        (r"\d{2,3}", ["12", "123"], ["1", "1234", "٣٣"]),
        (r"^a|b$", ["a", "b"], ["ab"]),
        (r"\w\W", ["a-"], ["aé", "é-"]),
        (r"\S\s", ["a "], ["\u00a0 ", "\x1fa"]),
        (r"[^\W\d]", ["a"], ["1", "-", "²"]),
        (r"[^\w]", ["-"], ["é", "a"]),
        (r"[a-c\]\-é]+", ["a]-é"], ["d"]),
        (r".", ["x", "😀"], ["\n", "\u2028"]),
        (r"(?:a|b)*?c", ["abc", "c"], ["ab"]),
        (r"\x41\u00e9\.\/\{", ["Aé./{"], ["Aé-/{"]),
        (r"a{x}", ["a{x}"], ["ax"]),
        (r"[&&\[~~\-]+", ["&[~-"], ["a"]),
        (r"\p{L}\P{L}", ["é1", "λ-"], ["1é", "éé"]),
        (r"[^\p{Lu}\d]\p{General_Category=Decimal_Number}", ["a1", "é٣"], ["A1", "aa"]),
        (r"\p{Script=Greek}+", ["αβ"], ["ab"]),
    ],
)
def test_regex_grammars_accept_and_reject(
    pattern: str, valid: list[str], invalid: list[str]
) -> None:
    assert [accepts("regex", pattern, text) for text in valid] == [True] * len(valid)
    assert [accepts("regex", pattern, text) for text in invalid] == [False] * len(invalid)


@pytest.mark.parametrize(
    "pattern",
    [
        *("(", ")", "a)", "[a", "[]", "[z-a]", r"[\w-x]", "*", "^*", "a**", "a{2}{3}", "(*a)"),
        *("(?=a)", "(?i)a", "(?P<n>a)", r"(a)\1", r"a\b", r"\cA", "\\", r"\x4", "a{,3}"),
        *(r"\pL", r"\p{Foo}", r"\p{Cs}", r"\p{L", r"\p{gc=Greek}", r"[\p{L}-z]"),
        *("a{3,2}", f"a{{{MAX_REPEAT + 1}}}", r"\ud83d\ude00"),
    ],
)
def test_unsupported_regular_expressions_are_refused(pattern: str) -> None:
    with pytest.raises(RegexError):
        translate(pattern, in_json=False)
    assert refusal("regex", pattern).startswith("it: the regular expression cannot be used: ")


def test_choice_grammars_accept_exactly_their_choices() -> None:
    choices = ["yes", "no (.*)", "é/\n", ""]
    for choice in choices:
        assert accepts("choice", json.dumps(choices), choice)
    assert not accepts("choice", json.dumps(choices), "no x")
    assert not accepts("choice", json.dumps(choices), "ye")


@pytest.mark.parametrize("source", ["[]", "{}", '["a", 1]', "NaN", "[", "[" * 50_000])
def test_malformed_choice_lists_are_refused(source: str) -> None:
    assert refusal("choice", source).startswith("it: ")


def test_json_object_accepts_any_object_and_nothing_else() -> None:
    assert accepts("json_object", "", '{"a": [1, {"b": null}]}')
    assert not accepts("json_object", "", "[]")


def test_lark_grammars_accept_and_reject() -> None:
    source = 'start: "a" rest\nrest: /[0-9]+/ | "(" rest ")"'
    assert accepts("grammar", source, "a((12))")
    assert not accepts("grammar", source, "a((12)")


GBNF = r"""
# arithmetic
root ::= ws expr ("\n" expr)* # lines
expr ::= term (
    [+*] term )*
term ::= "(" expr ")" | number | "caf\u00e9"
number ::= [0-9]{1,3} ("." [0-9]+)?
ws ::= [ \t]*
"""


@pytest.mark.parametrize("text", ["1+2", " (1.5*caf\u00e9)+222\n7"])
def test_gbnf_grammar_accepts_valid_text(text: str) -> None:
    assert accepts("grammar", GBNF, text)


@pytest.mark.parametrize("text", ["1+", "(1", "1234", "1 + 2", ""])
def test_gbnf_grammar_rejects_invalid_text(text: str) -> None:
    assert not accepts("grammar", GBNF, text)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ('root ::= ("a"*)* "b"', "aab"),
        ("root ::= [^a-c\\]]+ .", "xyz\n"),
        ('root ::= [+-] "1"', "-1"),
        ('root ::= "" | root "a"', "aaa"),
        ('root ::= a-b | A_B\na-b ::= "x"\nA_B ::= "y" root', "yyx"),
        ('root ::= ("a" | "b" root){2,}', "aab" + "aa"),
        ('root ::= word "x"\nword ::= [a-z]+', "axx"),
        ('root ::= "if" word | word "!"\nword ::= [a-z]+', "iffy"),
        ("root ::= [\\u00e0-\\u00ff\\-]+", "\u00e9-"),
        ("root ::= start\nstart ::= [a&&b]", "&"),
    ],
)
def test_gbnf_syntax_forms_are_supported(source: str, text: str) -> None:
    assert accepts("grammar", source, text)


@pytest.mark.parametrize(
    "source",
    [
        *('root ::= "a', "root ::= [a", "root ::= (a", "root ::= x", "root ::= *", "root = a"),
        *("root ::= [z-a]", 'root ::= "a"{3,1}', 'root ::= "\\q"', 'root ::= "a"\nroot ::= "b"'),
        *("root ::= []", 'root ::= "a"{1,1000000000}', "root ::= " + "(" * 200),
    ],
)
def test_malformed_gbnf_is_refused(source: str) -> None:
    if source == "root = a":  # not GBNF, and not Lark either
        grammar = grammar_text(GrammarSpec(kind="grammar", source=source))
        assert problem_of(grammar, byte_tokenizer())
    else:
        assert refusal("grammar", source).startswith("it: the GBNF grammar cannot be used: ")


@pytest.mark.parametrize("kind", ["json_schema", "regex", "choice", "grammar"])
def test_grammar_size_is_limited_before_parsing(kind: str) -> None:
    assert "at most 65536 are taken" in refusal(kind, "(" * (MAX_SOURCE_BYTES + 1))


def test_grammar_size_is_counted_in_bytes_up_to_the_limit() -> None:
    assert refusal("choice", "x" * MAX_SOURCE_BYTES).startswith("it: it is not JSON")
    assert "at most 65536 are taken" in refusal("choice", "é" * (MAX_SOURCE_BYTES // 2 + 1))


@pytest.mark.parametrize("source", ["NaN", "[Infinity]", '{"minimum": -Infinity}'])
def test_nan_and_infinity_in_schemas_are_refused(source: str) -> None:
    assert "is not JSON" in refusal("json_schema", source)


@pytest.mark.parametrize("kind", ["json_schema", "regex", "choice", "grammar"])
def test_lone_surrogates_in_grammars_are_refused(kind: str) -> None:
    assert "surrogate" in refusal(kind, '"\ud800"')


def test_llguidance_is_imported_only_when_needed() -> None:
    code = (
        "import sys, engine.core.grammar.spec, engine.core.grammar.checker; "
        "sys.exit('llguidance' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
