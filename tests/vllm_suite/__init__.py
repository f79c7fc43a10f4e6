"""Runs vLLM's own tests of its OpenAI API against our server. Nothing in them is changed.

The tests start servers by the class `RemoteOpenAIServer` of vLLM's `tests/utils.py`. `launcher.py`
takes the place of that file. `plugin.py` supplies the few names that the tests import from vLLM.
`excluded.py` lists the tests that do not apply. `make test-vllm-suite` runs all others.
"""
