// `SamplingCall`: converts the `SamplingInputs` of the Python model runner to raw arrays, and
// allocates the arrays for the results of a step. It is used like this:
//
//   SamplingCall call(sampling);
//   sampler.begin(call.inputs, call.outputs);
//   ... sampler.sample_row(kernels, logits, row, scratch) for every row; needs no GIL ...
//   sampler.end();
//   return call.results();
#pragma once
#include <vector>

#include "bindings/bindings.h"
#include "sampler/sampler.h"

namespace engine {

class SamplingCall {
  public:
    // Raises ValueError if the sizes of the arrays in `sampling` do not match.
    explicit SamplingCall(nb::handle sampling);
    // Returns (tokens, logprobs, top_ids, top_logprobs) as in `StepOutput`. The last three may be None.
    nb::tuple results() const;

    SamplingArrays inputs;
    SampledArrays outputs;

  private:
    template <class T>
    const T* column(nb::handle sampling, const char* name, size_t size);
    void read_biases(nb::handle sampling);
    void read_histories(nb::handle sampling);

    std::vector<nb::object> keep_;  // keeps alive the arrays that `inputs` points into
    nb::object tokens_, logprobs_, top_ids_, top_logprobs_;
};

}  // namespace engine
