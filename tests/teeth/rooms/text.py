"""Mutations between tokens and text, and of stop strings."""

from tests.teeth.mutation import Mutation

MUTATIONS = [
    Mutation(
        "stop strings: the last character of a beginning is let go",
        "engine.core.text.detokenizer",
        "for char in text[:-1])",
        "for char in text[:-2])",
        "tests/property/test_detokenizer.py::test_a_stop_string_in_two_pieces_is_never_shown",
    ),
    Mutation(
        "stop strings: the first of the list wins",
        "engine.core.text.detokenizer",
        "_, start, self.stopped = min(found)",
        "_, start, self.stopped = found[0]",
        "tests/property/test_detokenizer.py::test_stop_strings_wherever_the_text_is_cut",
    ),
    Mutation(
        "stop strings: a beginning is shown but for its last character",
        "engine.core.text.detokenizer",
        "range(min(len(stop) - 1, len(text)), longest, -1)",
        "range(min(len(stop) - 2, len(text)), longest, -1)",
        "tests/property/test_detokenizer.py::test_stop_strings_wherever_the_text_is_cut",
    ),
    Mutation(
        "detokenizer: every space is the first",
        "engine.core.text.detokenizer",
        "            self._drop_space = False\n",
        "",
        "tests/property/test_detokenizer.py::test_only_the_first_space_of_a_text_is_dropped",
    ),
    Mutation(
        "detokenizer: a text that goes on loses its space",
        "engine.core.text.detokenizer",
        "drops_leading_space and not continuation",
        "drops_leading_space",
        "tests/property/test_detokenizer.py::test_only_the_first_space_of_a_text_is_dropped",
    ),
    Mutation(
        "templates: letters make a control token beside an edge",
        "engine.core.text.chat_template",
        "            hidden = smuggled | specials.edges\n",
        "            hidden = specials.edges\n",
        "tests/unit/test_chat_template.py::test_a_control_token_of_letters_stays_text_beside_an_edge_of_another",
    ),
    Mutation(
        "templates: a field's name makes a control token",
        "engine.core.text.chat_template",
        "            yield from _strings(key, depth + 1)\n",
        "",
        "tests/unit/test_chat_template.py::test_names_of_fields_are_a_clients_text_too",
    ),
    Mutation(
        "templates: a role is hidden from its template",
        "engine.core.text.chat_template",
        'item if key == "role" else self.put_on(item)',
        "self.put_on(item)",
        "tests/unit/test_chat_template.py::test_a_control_token_is_built_of_a_role_whatever_the_text_says",
    ),
    Mutation(
        "templates: edges are hidden where nothing is at stake",
        "engine.core.text.chat_template",
        "            if _controls(apart) != _controls(segments):\n    ",
        "            if True:\n    ",
        "tests/unit/test_chat_template.py::test_templates_can_cut_a_text_where_no_control_token_is_at_stake",
    ),
    Mutation(
        "word pieces: a piece that continues a word begins one",
        "engine.core.text.tokenizer_tables",
        'f"##{piece}"',
        "piece",
        "tests/parity/test_tokenizers.py::test_word_piece_matches_the_library",
    ),
    Mutation(
        "unigram: runs of spaces are kept",
        "engine.core.text.tokenizer_tables",
        'normalizers.Replace(Regex(" {2,}"), " ")',
        'normalizers.Replace(Regex(" {9,}"), " ")',
        "tests/parity/test_tokenizers.py::test_unigram_matches_sentencepiece",
    ),
    Mutation(
        "character maps: a trie may point outside itself",
        "engine.core.text.charsmap",
        "if base | 0xFF >= len(units):",
        "if False:",
        "tests/unit/test_tokenizer_mutations.py::test_damaged_character_map_in_tokenizer_json",
    ),
    Mutation(
        "ranks: tokens take the ids of control tokens",
        "engine.core.text.tokenizer_ranks",
        "first_id + rank for",
        "rank for",
        "tests/parity/test_tokenizers.py::test_tekken_matches_tiktoken",
    ),
    Mutation(
        "decoders: any strip counts as one leading space",
        "engine.core.text.tokenizer_json",
        'content=" ", start=1, stop=0)',
        "stop=0)",
        "tests/unit/test_tokenizer_mutations.py::test_decoders_that_change_the_text_are_refused",
    ),
]
