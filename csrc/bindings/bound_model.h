// A model as Python holds it, for the files that bind its methods.
#pragma once
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <deque>

#include "bindings/bind_sampler.h"
#include "executor/model.h"
#include "executor/numa.h"
#include "per_channel/requantized.h"

namespace engine {

using Ints = Array<const int32_t, 1>;
using Longs = Array<const int64_t, 1>;
using Tables = Array<const int32_t, 2>;
using Embeds = Array<const float, 2>;

// A model whose weights are Python arrays. The object holds references to these arrays.
class BoundModel {
  public:
    // `cpus`: the CPU numbers that each thread is bound to, or none. `nodes`: the NUMA node of each thread, or
    // none if the machine has one node.
    BoundModel(const std::string& isa, int threads, const std::vector<std::vector<int>>& cpus,
               const std::vector<int>& nodes)
        : model(kernels_named(isa), threads, checked(threads, {cpus, nodes})) {}

    int add_matrix(int layout, int rows, int columns, Array<const uint8_t, 1> data) {
        Matrix matrix{Layout(layout), rows, columns, data.data()};
        if (layout < 0 || layout > int(Layout::F32) || rows < 1 || columns < 1 ||
            data.shape(0) < matrix.bytes())
            throw nb::value_error("a matrix that its bytes do not hold");
        if (reinterpret_cast<uintptr_t>(data.data()) % 64)
            throw nb::value_error("a matrix must be 64-byte aligned");
        panels_.push_back(int(data.shape(0) / matrix.stride()));
        if (model.executor.pool().nodes().empty()) {
            keep_.push_back(nb::cast(data));
        } else {
            copies_.push_back(copy_by_node(model.executor.pool(), matrix, panels_.back()));
            matrix.data = copies_.back().data();
        }
        matrices_.push_back(matrix);
        return int(matrices_.size()) - 1;
    }

    int add_vector(Array<const float, 1> data) {
        vectors_.push_back(data.data());
        keep_.push_back(nb::cast(data));
        return int(vectors_.size()) - 1;
    }

    // Requantizes the matrices with the indices `numbers` to per-channel int8. Returns the indices
    // of the new matrices.
    std::vector<int> add_per_channel(const std::vector<int>& numbers) {
        if (!model.executor.kernels().requantize_panel)
            throw nb::value_error("this instruction set has no per-channel int8 matmul");
        std::vector<StoredPanels> from;
        for (int number : numbers) {
            from.push_back({matrix(number), panels_.at(size_t(number))});
            if (from.back().matrix->columns > kMaxPerChannelColumns)
                throw nb::value_error("a matrix of too many columns for per-channel int8");
        }
        RequantizedMatrices per_channel =
            requantize_matrices(model.executor.kernels(), model.executor.pool(), from);
        std::vector<int> added;
        for (const Matrix& matrix : per_channel.matrices) {
            added.push_back(int(matrices_.size()));
            matrices_.push_back(matrix);
        }
        copies_.push_back(std::move(per_channel.memory));
        return added;
    }

    // `numbers`: matrix, bias, decode numerics, prefill numerics. The matrix has the panels of all experts.
    ExpertMatrices expert_matrices(int num_experts, const std::tuple<int, int, int, int>& numbers) const {
        auto [index, bias, decode, prefill] = numbers;
        const Matrix* all = matrix(index);
        int panels = panels_.at(size_t(index)) / num_experts;
        return {*all,
                size_t(panels) * all->stride(),
                vector(bias),
                panels * kPanelRows,
                Numerics(decode),
                Numerics(prefill)};
    }

    const Matrix* matrix(int index) const { return &matrices_.at(size_t(index)); }
    const float* vector(int index) const { return index < 0 ? nullptr : vectors_.at(size_t(index)); }

    void check_row(int index, size_t size, int expected) const {
        if (index < 0 || index >= model.num_logits() || size != size_t(expected))
            throw nb::value_error("no such row of logits, or one of another size");
    }

    void begin_program(int capacity) {
        program_ = Program{};
        program_.capacity = capacity;
    }
    void add_op(const Op& op) { program_.ops.push_back(op); }
    void end_program() { model.executor.add_program(std::move(program_)); }

    // Keeps the arrays of adapter `index` alive, instead of those of an earlier one.
    void keep_adapter(int index, nb::object arrays) {
        if (adapter_arrays_.size() <= size_t(index)) adapter_arrays_.resize(size_t(index) + 1);
        adapter_arrays_[size_t(index)] = std::move(arrays);
    }

    Model model;

  private:
    static const Placement checked(int threads, Placement placement) {
        for (size_t size : {placement.cpus.size(), placement.nodes.size()})
            if (size != 0 && size != size_t(threads))
                throw nb::value_error("a placement must name every thread or none");
        return placement;
    }

    std::deque<Matrix> matrices_;  // the matrices that Python added, then the requantized ones
    std::vector<int> panels_;      // number of panels of each matrix that Python added
    std::vector<const float*> vectors_;
    std::vector<nb::object> keep_, adapter_arrays_;
    std::vector<Block> copies_;  // requantized matrices, and copies of matrices for NUMA nodes
    Program program_;
};

// Binds the methods that append an op to the program.
void bind_ops(nb::class_<BoundModel>& model);
// Binds the method that sets a LoRA adapter.
void bind_adapters(nb::class_<BoundModel>& model);

// The taps of a step, from Python's `TapInputs`. It holds the arrays while the step runs.
struct TapCall {
    Ints sites, tokens, kinds, rows;
    Array<const float, 1> scales;
    Embeds vectors;
    std::optional<Array<float, 2>> captured;

    TapArrays read(nb::handle taps, std::optional<Array<float, 2>> out);
};
void bind_taps(nb::class_<BoundModel>& model);

}  // namespace engine
