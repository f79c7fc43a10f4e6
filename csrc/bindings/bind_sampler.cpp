#include "bindings/bind_sampler.h"

#include <algorithm>

namespace engine {
namespace {

size_t length(nb::handle sampling, const char* name) {
    return nb::len(nb::object(sampling.attr(name)));
}

// Returns a new NumPy array and sets `data` to its memory.
template <class T, size_t N>
nb::object new_array(const size_t (&shape)[N], T*& data) {
    size_t size = 1;
    for (size_t extent : shape) size *= extent;
    data = new T[size]();
    nb::capsule owner(data, [](void* memory) noexcept { delete[] static_cast<T*>(memory); });
    return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<N>>(data, N, shape, owner));
}

nb::tuple sample(Sampler& sampler, const std::string& isa, Array<const float, 2> logits,
                 nb::handle sampling) {
    const Kernels& kernels = kernels_named(isa);
    SamplingCall call(sampling);
    require(logits.shape(0) == size_t(call.inputs.rows), "logits and sampling differ in rows");
    require(logits.shape(1) == size_t(sampler.vocab()), "logits and sampler differ in vocabulary");
    SampleScratch scratch(sampler.vocab());
    sampler.begin(call.inputs, call.outputs);
    for (int row = 0; row < call.inputs.rows; row++)
        sampler.sample_row(kernels, logits.data() + size_t(row) * logits.shape(1), row, scratch);
    sampler.end();
    return call.results();
}

}  // namespace

SamplingCall::SamplingCall(nb::handle sampling) {
    size_t rows = length(sampling, "slots");
    inputs.rows = int(rows);
    inputs.slots = column<int32_t>(sampling, "slots", rows);
    inputs.temperature = column<float>(sampling, "temperature", rows);
    inputs.top_k = column<int32_t>(sampling, "top_k", rows);
    inputs.top_p = column<float>(sampling, "top_p", rows);
    inputs.min_p = column<float>(sampling, "min_p", rows);
    inputs.repetition = column<float>(sampling, "repetition", rows);
    inputs.presence = column<float>(sampling, "presence", rows);
    inputs.frequency = column<float>(sampling, "frequency", rows);
    inputs.seed = column<int64_t>(sampling, "seed", rows);
    inputs.choice = column<int32_t>(sampling, "choice", rows);
    inputs.position = column<int32_t>(sampling, "position", rows);
    inputs.forced = column<int32_t>(sampling, "forced", rows);
    inputs.num_logprobs = column<int32_t>(sampling, "num_logprobs", rows);
    nb::object mask = sampling.attr("mask");
    if (!mask.is_none()) {
        auto bits = nb::cast<Array<const uint32_t, 2>>(mask);
        require(bits.shape(0) == rows, "mask: another number of rows");
        inputs.mask = bits.data();
        inputs.mask_words = int(bits.shape(1));
        keep_.push_back(nb::cast(bits));
    }
    read_biases(sampling);
    read_histories(sampling);

    int max_logprobs = rows ? *std::max_element(inputs.num_logprobs, inputs.num_logprobs + rows) : -1;
    tokens_ = new_array<int32_t>({rows}, outputs.tokens);
    if (max_logprobs < 0) return;
    outputs.top_width = max_logprobs;
    logprobs_ = new_array<float>({rows}, outputs.logprobs);
    top_ids_ = new_array<int32_t>({rows, size_t(max_logprobs)}, outputs.top_ids);
    top_logprobs_ = new_array<float>({rows, size_t(max_logprobs)}, outputs.top_logprobs);
}

template <class T>
const T* SamplingCall::column(nb::handle sampling, const char* name, size_t size) {
    auto values = nb::cast<Array<const T, 1>>(sampling.attr(name));
    require(values.shape(0) == size, name);
    keep_.push_back(nb::cast(values));
    return values.data();
}

void SamplingCall::read_biases(nb::handle sampling) {
    size_t count = length(sampling, "bias_rows");
    inputs.biases = int(count);
    inputs.bias_rows = column<int32_t>(sampling, "bias_rows", count);
    inputs.bias_ids = column<int32_t>(sampling, "bias_ids", count);
    inputs.bias_values = column<float>(sampling, "bias_values", count);
}

void SamplingCall::read_histories(nb::handle sampling) {
    size_t count = length(sampling, "history_slots"), tokens = length(sampling, "history_tokens");
    inputs.histories = int(count);
    inputs.history_slots = column<int32_t>(sampling, "history_slots", count);
    inputs.history_start = column<int32_t>(sampling, "history_start", count + 1);
    inputs.history_tokens = column<int32_t>(sampling, "history_tokens", tokens);
    inputs.history_num_prompt = column<int32_t>(sampling, "history_num_prompt", count);
    const int32_t* ends = inputs.history_start;
    require(*std::max_element(ends, ends + count + 1) <= int64_t(tokens), "history_start");
}

nb::tuple SamplingCall::results() const {
    auto or_none = [](const nb::object& value) { return value.is_valid() ? value : nb::none(); };
    return nb::make_tuple(tokens_, or_none(logprobs_), or_none(top_ids_), or_none(top_logprobs_));
}

void bind_sampler(nb::module_& module) {
    nb::class_<Sampler>(module, "Sampler")
        .def(nb::init<int, int, int>(), nb::arg("vocab"), nb::arg("max_slots"), nb::arg("max_seq_len"))
        .def("sample", &sample, nb::arg("isa"), nb::arg("logits"), nb::arg("sampling"));
}

}  // namespace engine
