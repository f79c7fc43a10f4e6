"""What every route does for each kind of key, and with the objects of another tenant.

A row is a method, a path, who may call it, and each place where a request names an object, with
the kind of that object and the status of the answer if it is another tenant's. The answer is the
same as for an object that does not exist. A row is continued by indented lines.

Who may call a route:

open      everyone
key       everyone with a key of a client or of the administrator
metrics   the same, except for keys that are limited to some models; and the token of metrics
admin     the administrator
node      the administrator, and who has the token of the nodes

Places: `{name}` is a parameter of the path, `?name` one of the query, and `a.0.b` one of the body.
The kind `-` is no object. The status is 404 if none is given. With `!`, even the owner gets that
answer. With the status 200 the answer has only objects of the client.
"""

from dataclasses import dataclass
from typing import Literal, cast

Access = Literal["open", "key", "metrics", "admin", "node"]

TABLE = """
GET / key
HEAD / key
POST / key model=model
HEAD /api/blobs/{digest} key {digest}=-
POST /api/chat key model=model
POST /api/copy admin
POST /api/create admin
DELETE /api/delete admin
POST /api/embed key model=model
POST /api/embeddings key model=model
POST /api/generate key model=model
GET /api/ps key
POST /api/pull admin
POST /api/show key model=model
GET /api/tags key
GET /api/version key
POST /apply-template key model=model
POST /chat/completions key interp.edit.0.from.id=result model=model
POST /chat/completions/input_tokens key model=model
POST /classify key model=model
POST /completion key model=model
POST /completions key model=model
POST /detokenize key model=model
POST /embed key model=model
POST /embedding key model=model
POST /embeddings key model=model
POST /flush_cache admin
POST /generate key model=model
DELETE /generate/{request_id} key {request_id}=submission
GET /generate/{request_id} key {request_id}=submission
GET /generate/{request_id}/stream key {request_id}=submission
POST /generate_stream key model=model
GET /get_model_info key
GET /get_server_info key
GET /health open
HEAD /health open
GET /health_generate key
GET /healthz open
HEAD /healthz open
POST /infill key model=model
POST /invocations key model=model
GET /info key
GET /is_sleeping key
GET /livez open
HEAD /livez open
GET /load key
GET /lora-adapters key
POST /lora-adapters key
GET /metrics metrics
GET /model_info key
GET /models key
POST /openai/deployments/{deployment:path}/chat/completions key {deployment}=model
    interp.edit.0.from.id=result model=-
POST /openai/deployments/{deployment:path}/completions key {deployment}=model
    interp.edit.0.from.id=result model=-
POST /openai/deployments/{deployment:path}/embeddings key {deployment}=model model=-
GET /openapi.json key
GET /ping key
POST /ping key
POST /pooling key model=model
GET /props key ?model=model
POST /props key
GET /readyz open
HEAD /readyz open
POST /rerank key model=model
POST /reranking key model=model
POST /reset_prefix_cache admin
POST /responses key conversation=conversation input.0.id=output_item model=model
    previous_response_id=response
POST /responses/input_tokens key conversation=conversation input.0.id=output_item model=model
    previous_response_id=response
POST /score key model=model
GET /server_info key
POST /sleep admin
GET /slots key ?model=model
POST /start_profile admin
POST /stop_profile admin
POST /tokenize key model=model
GET /tokenizer_info key ?model=model
GET /v1/admin/audit admin
POST /v1/admin/cache/flush admin
POST /v1/admin/cache/warm admin
POST /v1/admin/drain admin
GET /v1/admin/keys admin
POST /v1/admin/keys admin
DELETE /v1/admin/keys/{name} admin
POST /v1/admin/keys/{name}/limits admin
POST /v1/admin/limits admin
GET /v1/admin/live admin
POST /v1/admin/log-level admin
GET /v1/admin/models admin
POST /v1/admin/models/load admin
POST /v1/admin/models/remove admin
POST /v1/admin/models/swap admin
POST /v1/admin/models/unload admin
GET /v1/admin/nodes node
DELETE /v1/admin/nodes/{name} node
GET /v1/admin/plugins admin
POST /v1/admin/plugins/{name}/enable admin
POST /v1/admin/reload admin
GET /v1/admin/requests key ?limit=-
GET /v1/admin/requests/{request_id} key {request_id}=request
POST /v1/admin/requests/{request_id}/replay admin
GET /v1/admin/routes admin
GET /v1/admin/routes/{request_id} admin
GET /v1/admin/shadow admin
GET /v1/admin/snapshot admin
GET /v1/admin/status admin
POST /v1/admin/undrain admin
GET /v1/batches key ?after=batch
POST /v1/batches key input_file_id=file:400
GET /v1/batches/{batch_id} key {batch_id}=batch
POST /v1/batches/{batch_id}/cancel key {batch_id}=batch
GET /v1/capabilities key
GET /v1/chat/completions key ?after=chat ?model=-
POST /v1/chat/completions key interp.edit.0.from.id=result model=model
POST /v1/chat/completions/batch key interp.edit.0.from.id=result:400! model=model
POST /v1/chat/completions/input_tokens key model=model
DELETE /v1/chat/completions/{completion_id} key {completion_id}=chat
GET /v1/chat/completions/{completion_id} key {completion_id}=chat
POST /v1/chat/completions/{completion_id} key {completion_id}=chat
GET /v1/chat/completions/{completion_id}/messages key {completion_id}=chat ?after=message:400
POST /v1/completions key interp.edit.0.from.id=result model=model
POST /v1/conversations key
DELETE /v1/conversations/{conversation_id} key {conversation_id}=conversation
GET /v1/conversations/{conversation_id} key {conversation_id}=conversation
POST /v1/conversations/{conversation_id} key {conversation_id}=conversation
GET /v1/conversations/{conversation_id}/items key {conversation_id}=conversation ?after=item:400
POST /v1/conversations/{conversation_id}/items key {conversation_id}=conversation
DELETE /v1/conversations/{conversation_id}/items/{item_id} key {conversation_id}=conversation
    {item_id}=item
GET /v1/conversations/{conversation_id}/items/{item_id} key {conversation_id}=conversation
    {item_id}=item
POST /v1/embeddings key model=model
GET /v1/engines key
GET /v1/engines/{model_id:path} key {model_id}=model
GET /v1/files key ?after=file
POST /v1/files key
DELETE /v1/files/{file_id} key {file_id}=file
GET /v1/files/{file_id} key {file_id}=file
GET /v1/files/{file_id}/content key {file_id}=file
POST /v1/fim/completions key model=model
GET /v1/fine_tuning/jobs key ?after=job
POST /v1/fine_tuning/jobs key model=model:400! training_file=training_file:400
    validation_file=training_file:400
GET /v1/fine_tuning/jobs/{job_id} key {job_id}=job
POST /v1/fine_tuning/jobs/{job_id}/cancel key {job_id}=paused_job
GET /v1/fine_tuning/jobs/{job_id}/checkpoints key {job_id}=job ?after=checkpoint:400
GET /v1/fine_tuning/jobs/{job_id}/events key {job_id}=job ?after=event:200
POST /v1/fine_tuning/jobs/{job_id}/pause key {job_id}=paused_job
POST /v1/fine_tuning/jobs/{job_id}/resume key {job_id}=paused_job
DELETE /v1/interp/results/{result_id} key {result_id}=result
GET /v1/interp/results/{result_id} key {result_id}=result
POST /v1/interp/run key interp.edit.0.from.id=result model=model
GET /v1/interp/sites key ?model=model
GET /v1/interp/vectors key
POST /v1/load_lora_adapter admin
POST /v1/messages key model=model
GET /v1/messages/batches key ?after_id=message_batch ?before_id=message_batch
POST /v1/messages/batches key
DELETE /v1/messages/batches/{batch_id} key {batch_id}=message_batch
GET /v1/messages/batches/{batch_id} key {batch_id}=message_batch
POST /v1/messages/batches/{batch_id}/cancel key {batch_id}=message_batch
GET /v1/messages/batches/{batch_id}/results key {batch_id}=message_batch
POST /v1/messages/count_tokens key model=model
GET /v1/models key
DELETE /v1/models/{model_id:path} key {model_id}=model
GET /v1/models/{model_id:path} key {model_id}=model
POST /v1/moderations key model=-
POST /v1/rerank key model=model
POST /v1/reranking key model=model
POST /v1/responses key conversation=conversation input.0.id=output_item model=model
    previous_response_id=response
POST /v1/responses/compact key conversation=conversation input.0.id=output_item model=model
    previous_response_id=response
POST /v1/responses/input_tokens key conversation=conversation input.0.id=output_item model=model
    previous_response_id=response
DELETE /v1/responses/{response_id} key {response_id}=response
GET /v1/responses/{response_id} key {response_id}=response
POST /v1/responses/{response_id}/cancel key {response_id}=response
GET /v1/responses/{response_id}/input_items key {response_id}=response ?after=input_item:400
POST /v1/score key model=model
POST /v1/unload_lora_adapter admin
POST /v1/uploads key
POST /v1/uploads/{upload_id}/cancel key {upload_id}=upload
POST /v1/uploads/{upload_id}/complete key {upload_id}=upload part_ids.0=part:400
POST /v1/uploads/{upload_id}/parts key {upload_id}=upload
GET /v2 key
GET /v2/health/live open
GET /v2/health/ready open
GET /v2/models/{name:path} key {name}=model
POST /v2/models/{name:path}/generate key {name}=model
POST /v2/models/{name:path}/generate_stream key {name}=model
POST /v2/models/{name:path}/infer key {name}=model model_name=-
GET /v2/models/{name:path}/ready key {name}=model
GET /v2/models/{name:path}/versions/{version} key {name}=model {version}=-
POST /v2/models/{name:path}/versions/{version}/generate key {name}=model {version}=-
POST /v2/models/{name:path}/versions/{version}/generate_stream key {name}=model {version}=-
POST /v2/models/{name:path}/versions/{version}/infer key {name}=model {version}=- model_name=-
GET /v2/models/{name:path}/versions/{version}/ready key {name}=model {version}=-
POST /v2/repository/index key
POST /v2/rerank key model=model
GET /version key
POST /wake_up admin
"""

# Parameters of queries and bodies that name no object of a tenant. What they name is shared, or
# belongs to the request alone.
_PLAIN_NAMES = """
add_generation_prompt add_special_tokens allowed_token_ids autoload background bad_words best_of
bytes cache_control cache_prompt cache_salt chat_template_kwargs client_metadata completion_window
content context context_management continue_final_message decoder_input_details details dimensions
do_sample documents dry_allowed_length dry_base dry_multiplier dry_penalty_last_n
dry_sequence_breakers dynatemp_exponent dynatemp_range early_stopping echo embd_normalize
enable_thinking encoding_format endpoint exclude_input_in_output expires_after
expires_after.anchor expires_after.seconds fail_on_no_slot filename format frequency_penalty
grammar guided_choice guided_grammar guided_json guided_regex hyperparameters
hyperparameters.batch_size hyperparameters.beta hyperparameters.learning_rate_multiplier
hyperparameters.n_epochs id id_slot ignore_eos images include include_obfuscation
include_reasoning include_stop_str_in_output input input_extra input_extra.filename
input_extra.text input_ids input_prefix input_suffix inputs inputs.data inputs.datatype
inputs.name inputs.parameters inputs.shape instructions integrations interp interp.attention
interp.attention.heads interp.attention.layers interp.attention.phase interp.attention.positions
interp.attribution interp.attribution.method interp.attribution.position interp.attribution.target
interp.capture interp.capture.phase interp.capture.positions interp.capture.site interp.edit
interp.edit.feature interp.edit.from interp.edit.from.positions interp.edit.from.site
interp.edit.op interp.edit.phase interp.edit.positions interp.edit.sae interp.edit.scale
interp.edit.site interp.edit.vector interp.encoding_format interp.features interp.features.phase
interp.features.positions interp.features.sae interp.features.site interp.features.top interp.lens
interp.lens.layers interp.lens.phase interp.lens.positions interp.lens.top interp.lens.tuned
interp.store items keep_alive length_penalty limit logit_bias logprob_start_len logprob_token_ids
logprobs lora lora.alpha lora.dropout lora.rank lora.target_modules max_completion_tokens
max_output_tokens max_tokens max_tool_calls md5 messages metadata metadata.user_id method
method.dpo method.dpo.hyperparameters method.dpo.hyperparameters.batch_size
method.dpo.hyperparameters.beta method.dpo.hyperparameters.learning_rate_multiplier
method.dpo.hyperparameters.n_epochs method.supervised method.supervised.hyperparameters
method.supervised.hyperparameters.batch_size method.supervised.hyperparameters.beta
method.supervised.hyperparameters.learning_rate_multiplier
method.supervised.hyperparameters.n_epochs method.type mime_type min_keep min_p min_tokens
mirostat mirostat_eta mirostat_tau moderation n n_predict n_probs name normalize options order
output_config output_config.effort output_config.format output_config.format.schema
output_config.format.type output_expires_after output_expires_after.anchor
output_expires_after.seconds output_format output_format.schema output_format.type outputs
outputs.name outputs.parameters parallel_tool_calls parameters parse_special personality
prediction prediction.content prediction.content.text prediction.content.type prediction.type
presence_penalty priority prompt prompt_cache_key prompt_cache_options prompt_cache_retention
prompt_logprobs prompt_name purpose query raw reasoning reasoning.context reasoning.effort
reasoning.generate_summary reasoning.mode reasoning.summary reasoning_effort repeat_last_n
repetition_penalty requests requests.custom_id requests.params response_fields response_format
return_documents return_finish_reason return_full_text return_logprob return_num_input_tokens
return_num_output_tokens return_progress return_text_in_logprobs return_token_ids
return_token_strs return_tokens return_tokens_as_token_ids rid safety_identifier samplers seed
service_tier shift skip_special_tokens speed starting_after stop stop_regex stop_sequences
stop_token_ids store stream stream_options stream_options.continuous_usage_stats
stream_options.include_obfuscation stream_options.include_usage structured_outputs suffix system
task temperature template text text.format text.verbosity text_1 text_2 text_input think thinking
thinking.budget_tokens thinking.display thinking.type timings_per_token tokens tool_choice
tool_choice.disable_parallel_tool_use tool_choice.name tool_choice.type tools top_k top_logprobs
top_logprobs_num top_n top_n_sigma top_n_tokens top_p truncate truncate_prompt_tokens truncation
truncation_direction truncation_side typical_p use_beam_search user verbose verbosity version
xtc_probability xtc_threshold
"""
PLAIN = frozenset(_PLAIN_NAMES.split())


@dataclass(frozen=True)
class Place:
    name: str
    kind: str  # of `World.objects`
    status: int  # of the answer about another tenant's object
    for_owner: bool  # whether the owner gets another answer


@dataclass(frozen=True)
class Row:
    name: str  # method and path
    access: Access
    places: tuple[Place, ...]
    plain: frozenset[str]  # places that name no object on this route

    @property
    def method(self) -> str:
        return self.name.partition(" ")[0]

    @property
    def path(self) -> str:
        return self.name.partition(" ")[2]


def _row(line: str) -> Row:
    method, path, access, *cells = line.split()
    pairs = [cell.rsplit("=", 1) for cell in cells]
    places = tuple(_place(name, what) for name, what in pairs if what != "-")
    plain = frozenset(name for name, what in pairs if what == "-")
    return Row(f"{method} {path}", cast(Access, access), places, plain)


def _place(name: str, what: str) -> Place:
    kind, _, status = what.removesuffix("!").partition(":")
    return Place(name, kind, int(status or 404), not what.endswith("!"))


ROWS = {row.name: row for row in map(_row, TABLE.replace("\n    ", " ").strip().splitlines())}
