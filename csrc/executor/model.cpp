#include "executor/model.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace engine {
namespace {

void need(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
}

bool all_within(const int32_t* values, int count, int limit) {
    return std::all_of(values, values + count,
                       [limit](int32_t value) { return value >= 0 && value < limit; });
}

}  // namespace

// Checks every index of the step that is used to address memory later.
void Model::check(const StepArrays& step) const {
    const Program& program = executor.program(step.tokens);
    need(step.tokens > 0 && step.tokens <= program.capacity,
         "a step of more tokens than the model has room for");
    need(step.logits <= executor.max_logits(), "a step of more logits than the model has room for");
    need(step.query_start[0] == 0 && step.query_start[step.rows] == step.tokens &&
             std::is_sorted(step.query_start, step.query_start + step.rows + 1),
         "rows of a step that are not its tokens");
    need(all_within(step.token_ids, step.tokens, program.ops[0].matrix->rows),
         "a token outside the vocabulary");
    need(all_within(step.positions, step.tokens, max_positions), "a position outside the context");
    need(!step.token_types || all_within(step.token_types, step.tokens, program.ops[0].num_types),
         "a token type that is not there");
    need(all_within(step.logit_rows, step.logits, step.tokens), "logits of a token that is not there");
    const int states = executor.num_states();
    for (int row = 0; row < step.rows && states > 0; row++) {
        need(step.slots && step.slots[row] >= 0 && step.slots[row] < states, "a state that is not there");
        need(!step.state_load || step.state_load[row] < states, "a state to load that is not there");
        need(!step.state_save || step.state_save[row] < states, "a state to save that is not there");
    }
    need(all_within(step.embed_rows, step.num_embeds, step.tokens),
         "an embedding of a token that is not there");
    for (int row = 0; step.adapter_ids && row < step.rows; row++)
        need(executor.adapters.has(step.adapter_ids[row]), "an adapter that is not there");
    const KvCache& cache = executor.cache(0);
    for (int token = 0; step.visible_end && token < step.tokens; token++)
        need(step.visible_end[token] > step.positions[token] &&
                 step.visible_end[token] <= step.table_width * cache.block_size,
             "a visible position outside the blocks of the rows");
    check_taps(step);
    check_cache(step, cache, step.block_tables, step.write_slots);
    if (executor.has_window_cache()) {
        need(step.window_tables && step.window_slots, "no blocks for the windowed layers");
        check_cache(step, executor.cache(1), step.window_tables, step.window_slots);
    }
    for (int row = 0; row < step.rows; row++) {
        int32_t last = step.query_start[row + 1] - 1, group = step.prefix_groups[row];
        bool reaches =
            last < step.query_start[row] || step.positions[last] / cache.block_size < step.table_width;
        need(reaches, "a position outside its row's blocks");
        need(group < step.groups, "a prefix group that is not there");
        need(group < 0 || step.prefix_blocks[group] <= step.table_width, "a prefix longer than its rows");
    }
}

void Model::check_taps(const StepArrays& step) const {
    const TapArrays& taps = step.taps;
    const std::vector<TapSite>& sites = executor.sites();
    need(all_within(taps.sites, taps.count, int(sites.size())), "a tap at a site that is not there");
    need(all_within(taps.tokens, taps.count, step.tokens), "a tap of a token that is not there");
    need(all_within(taps.kinds, taps.count, int(TapKind::Clamp) + 1), "an unknown kind of tap");
    for (int i = 0; i < taps.count; i++) {
        const int width = sites[size_t(taps.sites[i])].width;
        const TapKind kind = TapKind(taps.kinds[i]);
        if (kind == TapKind::Capture)
            need(taps.rows[i] >= 0 && taps.rows[i] < taps.num_captured && width <= taps.captured_width,
                 "a capture without room");
        else
            need(taps.rows[i] >= 0 && taps.rows[i] + (kind == TapKind::Clamp) < taps.num_vectors &&
                     width + 2 <= taps.vector_width,
                 "a tap without its vector");
        need(i == 0 || taps.sites[i - 1] <= taps.sites[i], "taps that are not sorted by site");
    }
}

void Model::check_cache(const StepArrays& step, const KvCache& cache, const int32_t* tables,
                        const int64_t* slots) const {
    need(all_within(tables, step.rows * step.table_width, int(cache.blocks)), "a block that is not there");
    int64_t count = cache.blocks * cache.block_size;
    need(std::all_of(slots, slots + step.tokens, [count](int64_t slot) { return slot >= 0 && slot < count; }),
         "a slot outside the cache");
}

// Puts decode tokens before prefill tokens. The two kinds may use different numerics, so each must be one
// contiguous range.
void Model::reorder(const StepArrays& step) {
    size_t tokens = size_t(step.tokens);
    order_.clear();
    row_of_.resize(tokens);
    int decode_tokens = 0;
    for (bool prefill : {false, true}) {
        for (int row = 0; row < step.rows; row++)
            for (int32_t token = step.query_start[row]; token < step.query_start[row + 1]; token++) {
                if ((step.positions[token] < step.num_prompt[row]) != prefill) continue;
                row_of_[order_.size()] = row;
                order_.push_back(token);
            }
        if (!prefill) decode_tokens = int(order_.size());
    }
    token_ids_.resize(tokens);
    positions_.resize(tokens);
    write_slots_.resize(tokens);
    place_of_.resize(tokens);
    for (size_t i = 0; i < tokens; i++) {
        size_t token = size_t(order_[i]);
        token_ids_[i] = step.token_ids[token];
        positions_[i] = step.positions[token];
        write_slots_[i] = step.write_slots[token];
        place_of_[token] = int32_t(i);
    }
    std::vector<int32_t> by_place(size_t(step.logits));
    std::iota(by_place.begin(), by_place.end(), 0);
    auto place = [&](int32_t index) { return place_of_[size_t(step.logit_rows[index])]; };
    std::sort(by_place.begin(), by_place.end(), [&](int32_t a, int32_t b) { return place(a) < place(b); });
    logit_tokens_.clear();
    logit_place_.resize(size_t(step.logits));
    for (int32_t index : by_place) {
        logit_place_[size_t(index)] = int32_t(logit_tokens_.size());
        logit_tokens_.push_back(place(index));
    }
    auto first_prefill = std::lower_bound(logit_tokens_.begin(), logit_tokens_.end(), decode_tokens);

    auto copy = [&](const auto* from, auto& to) -> decltype(from) {
        if (!from) return nullptr;
        to.resize(tokens);
        for (size_t i = 0; i < tokens; i++) to[i] = from[order_[i]];
        return to.data();
    };

    embeds_.assign(step.num_embeds ? tokens : 0, nullptr);
    size_t width = size_t(executor.program(step.tokens).ops[0].matrix->columns);
    for (int i = 0; i < step.num_embeds; i++)
        embeds_[size_t(place_of_[size_t(step.embed_rows[i])])] = step.embeds + size_t(i) * width;

    batch_ = Batch{};
    batch_.embeds = embeds_.empty() ? nullptr : embeds_.data();
    batch_.visible_end = copy(step.visible_end, visible_end_);
    batch_.token_types = copy(step.token_types, token_types_);
    batch_.tokens = step.tokens;
    batch_.decode_tokens = decode_tokens;
    batch_.rows = step.rows;
    batch_.token_ids = token_ids_.data();
    batch_.positions = positions_.data();
    batch_.write_slots = write_slots_.data();
    batch_.row_of = row_of_.data();
    batch_.row_start = step.query_start;
    batch_.row_tokens = place_of_.data();
    batch_.slots = step.slots;
    batch_.tables = step.block_tables;
    batch_.table_width = step.table_width;
    batch_.window_slots = copy(step.window_slots, window_slots_);
    batch_.window_tables = step.window_tables;
    batch_.prefix_groups = step.prefix_groups;
    batch_.prefix_blocks = step.prefix_blocks;
    batch_.logit_tokens = logit_tokens_.data();
    batch_.logits = step.logits;
    batch_.decode_logits = int(first_prefill - logit_tokens_.begin());
}

// Finds the consecutive tokens, and the consecutive logits, that have the same adapter.
void Model::find_runs(const StepArrays& step) {
    runs_.clear();
    logit_runs_.clear();
    for (int token = 0; token < batch_.tokens; token++)
        extend_runs(runs_, token, step.adapter_ids[batch_.row_of[token]]);
    for (int i = 0; i < batch_.logits; i++)
        extend_runs(logit_runs_, i, step.adapter_ids[batch_.row_of[batch_.logit_tokens[i]]]);
    batch_.runs = runs_.data();
    batch_.num_runs = int(runs_.size());
    batch_.logit_runs = logit_runs_.data();
    batch_.num_logit_runs = int(logit_runs_.size());
}

void Model::place_taps(const StepArrays& step) {
    TapArrays taps = step.taps;
    if (taps.count) {
        tap_tokens_.clear();
        for (int i = 0; i < taps.count; i++) tap_tokens_.push_back(place_of_[size_t(taps.tokens[i])]);
        taps.tokens = tap_tokens_.data();
        logit_of_.assign(size_t(step.tokens), -1);
        for (size_t i = 0; i < logit_tokens_.size(); i++) logit_of_[size_t(logit_tokens_[i])] = int32_t(i);
        batch_.logit_of = logit_of_.data();
    }
    executor.set_taps(taps);
}

void Model::forward(const StepArrays& step, uint8_t* finite) {
    check(step);
    reorder(step);
    if (step.adapter_ids) find_runs(step);
    place_taps(step);
    for (int row = 0; step.state_load && row < step.rows; row++)
        if (step.state_load[row] >= 0) executor.copy_state(step.state_load[row], step.slots[row]);
    executor.run(batch_, finite_);
    for (int row = 0; step.state_save && row < step.rows; row++)
        if (step.state_save[row] >= 0) executor.copy_state(step.slots[row], step.state_save[row]);
    std::fill(finite, finite + step.rows, uint8_t(1));
    for (size_t i = 0; i < finite_.size(); i++)
        if (!finite_[i]) finite[row_of_[i]] = 0;
}

void Model::set_sampler(int vocab, int max_slots, int max_seq_len) {
    sampler_ = std::make_unique<Sampler>(vocab, max_slots, max_seq_len);
    sample_scratch_.clear();
    for (int thread = 0; thread < executor.pool().size(); thread++) sample_scratch_.emplace_back(vocab);
}

void Model::sample(const SamplingArrays& inputs, const SampledArrays& outputs) {
    sampler_->begin(inputs, outputs);
    std::atomic<int> next{0};
    auto sample_rows = [&](int thread) {
        for (int row; (row = next.fetch_add(1)) < inputs.rows;)
            sampler_->sample_row(executor.kernels(), logits(row), row, sample_scratch_[size_t(thread)]);
    };
    if (inputs.rows > 1)
        executor.pool().run(sample_rows);
    else
        sample_rows(0);
    sampler_->end();
}

void Model::hidden(int index, float* out) const {
    const Op& head = executor.program(batch_.tokens).ops.back();
    const float* x = executor.at(head.source, logit_place_[size_t(index)]);
    executor.normalize(head.norm, x, head.matrix->columns, out);
}

void Model::unembed(const float* x, int rows, float* out) {
    const Op& head = executor.program(1).ops.back();
    const size_t size = size_t(head.matrix->columns), vocab = size_t(executor.width(output));
    for (int done = 0; done < rows;) {
        const int count = std::min(rows - done, executor.max_logits());
        std::copy_n(x + size_t(done) * size, size_t(count) * size, executor.at(head.source, 0));
        executor.run_head(count);
        std::copy_n(executor.at(output, 0), size_t(count) * vocab, out + size_t(done) * vocab);
        done += count;
    }
}

void Model::head_row(int token, float* out) const {
    const Op& head = executor.program(1).ops.back();
    need(token >= 0 && token < head.matrix->rows, "a token outside the vocabulary");
    executor.kernels().embed(*head.matrix, token, out);
    for (int i = 0; i < head.matrix->columns; i++) out[i] *= head.norm.weight[i] * head.scale;
}

}  // namespace engine
