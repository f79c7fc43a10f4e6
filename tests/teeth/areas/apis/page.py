"""Mutations of the web page's routes."""

from tests.teeth.mutation import Mutation

ROUTES = "engine.servers.ui.routes"
TESTS = "tests/unit/servers/test_server_ui.py"

MUTATIONS = [
    Mutation(
        "any file is served",
        ROUTES,
        "    if name not in _names():\n",
        "    if False:\n",
        f"{TESTS}::test_unknown_ui_paths_are_404",
    ),
    Mutation(
        "the page takes Ollama's probe",
        ROUTES,
        "        if match is Match.NONE or (self._browsers_only and not _accepts_html(scope)):\n",
        "        if match is Match.NONE:\n",
        f"{TESTS}::test_browsers_get_the_page_and_ollama_clients_their_probe",
    ),
    Mutation(
        "the page can't be turned off",
        ROUTES,
        "    if not services.settings.server.ui:\n",
        "    if False:\n",
        f"{TESTS}::test_the_ui_can_be_turned_off",
    ),
    Mutation(
        "an unchanged file is sent again",
        ROUTES,
        '    if headers["etag"] in request.headers.get("if-none-match", ""):\n',
        "    if False:\n",
        f"{TESTS}::test_static_files_are_revalidated_by_etag",
    ),
]
