"""Mutations of model downloads and settings."""

from tests.teeth.mutation import Mutation

MUTATIONS = [
    Mutation(
        "fetch: the hub's key goes wherever it redirects",
        "engine.core.store.fetch",
        '"Bearer {self.value}"} if same_origin(self.origin, url) else {}',
        '"Bearer {self.value}"}',
        "tests/unit/core/store/test_pull.py::test_hub_token_is_sent_to_the_hub_and_not_to_redirect_targets",
    ),
    Mutation(
        "fetch: a part from elsewhere is joined",
        "engine.core.store.fetch",
        "        and int(range_start[1]) == offset\n",
        "",
        "tests/unit/core/store/test_fetch.py::test_a_range_response_that_does_not_match_is_not_appended",
    ),
    Mutation(
        "fetch: a part of another file is joined",
        "engine.core.store.fetch",
        "        and (found.total, found.sha256) == (state.total, state.sha256)\n",
        "",
        "tests/unit/core/store/test_fetch.py::test_a_range_response_that_does_not_match_is_not_appended",
    ),
    Mutation(
        "fetch: the server is not told which version is continued",
        "engine.core.store.fetch",
        '                headers["If-Range"] = state.etag',
        "                pass",
        "tests/unit/core/store/test_pull.py::test_changed_remote_content_is_never_appended_to_old_bytes",
    ),
    Mutation(
        "fetch: slow progress counts as failures",
        "engine.core.store.fetch",
        "failures = 1 if reached > best else failures + 1",
        "failures = failures + 1",
        "tests/unit/core/store/test_fetch.py::test_retries_are_counted_only_while_a_download_makes_no_progress",
    ),
    Mutation(
        "fetch: a short file is whole",
        "engine.core.store.fetch",
        "        if found.total is not None and self._part_size() != found.total:",
        "        if False:",
        "tests/unit/core/store/test_fetch.py::test_a_truncated_download_is_continued",
    ),
    Mutation(
        "fetch: a redirect leads away from encryption",
        "engine.core.store.fetch",
        '(httpx.URL(url).scheme, following.scheme) == ("https", "http")',
        "False",
        "tests/unit/core/store/test_fetch.py::test_a_redirect_from_https_to_http_is_refused",
    ),
]
