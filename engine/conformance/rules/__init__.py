"""All groups of rules, in the order in which they run."""

from engine.conformance.rule import Group
from engine.conformance.rules.chat import CHAT_GROUP
from engine.conformance.rules.completions import COMPLETIONS_GROUP
from engine.conformance.rules.embeddings import EMBEDDINGS
from engine.conformance.rules.errors import ERRORS
from engine.conformance.rules.files import BATCHES, FILES
from engine.conformance.rules.messages import MESSAGES
from engine.conformance.rules.models import MODELS
from engine.conformance.rules.parameters import PARAMETERS
from engine.conformance.rules.rerank import RERANK
from engine.conformance.rules.responses import RESPONSES
from engine.conformance.rules.robustness import ROBUSTNESS
from engine.conformance.rules.streaming import STREAMING
from engine.conformance.rules.structured import STRUCTURED
from engine.conformance.rules.tools import TOOLS

GROUPS: tuple[Group, ...] = (
    ERRORS,
    MODELS,
    CHAT_GROUP,
    STREAMING,
    PARAMETERS,
    TOOLS,
    STRUCTURED,
    COMPLETIONS_GROUP,
    EMBEDDINGS,
    RERANK,
    RESPONSES,
    MESSAGES,
    FILES,
    BATCHES,
    ROBUSTNESS,
)
