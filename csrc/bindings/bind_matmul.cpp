// Binds single matmuls, for tests and micro-benchmarks.
#include <nanobind/stl/optional.h>

#include <chrono>
#include <cstdlib>
#include <optional>
#include <vector>

#include "bindings/bindings.h"
#include "per_channel/requantized.h"

namespace engine {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Result = nb::ndarray<nb::numpy, float, nb::ndim<2>>;

// Aligned memory. It is on the heap, and its size is rounded up to a cache line only, so that
// AddressSanitizer detects accesses past the end.
class Buffer {
  public:
    explicit Buffer(size_t bytes) : data_(aligned_alloc(64, round_up_size(bytes + 1, 64))) {
        if (data_ == nullptr) throw std::bad_alloc();
    }
    Buffer(const Buffer&) = delete;
    ~Buffer() { free(data_); }
    uint8_t* bytes() const { return static_cast<uint8_t*>(data_); }
    float* floats() const { return static_cast<float*>(data_); }

  private:
    void* data_;
};

// A weight matrix, together with the matmul kernels of one instruction set and numerics, and the
// memory that these kernels need.
class BoundMatmul {
  public:
    BoundMatmul(const std::string& isa, int numerics, int layout, const Bytes& weights, int rows, int columns,
                int tokens, bool gated)
        : kernels_(kernels_named(isa)), numerics_(numerics), tokens_(tokens) {
        require(numerics >= 0 && numerics < kNumerics && kernels_.matmul[numerics], "no such numerics");
        require(layout >= 0 && layout <= int(Layout::I8), "no such layout");
        require((layout == int(Layout::I8)) == (numerics == int(Numerics::INT8_PER_CHANNEL)),
                "a layout that these numerics do not read");
        require(rows > 0 && columns > 0 && tokens > 0, "rows, columns and tokens must be positive");
        require(layout != int(Layout::I8) || columns <= kMaxPerChannelColumns, "too many columns");
        matrix_ = {Layout(layout), rows, columns, weights.data()};
        units_ = gated ? div_up(rows / 2, kPanelRows) : matrix_.panels();
        panels_ = gated ? 2 * units_ : units_;
        require(size_t(panels_) * matrix_.stride() <= weights.size(), "the weights are too short");
        require(reinterpret_cast<uintptr_t>(weights.data()) % 64 == 0, "the weights are not aligned");
        input_.emplace(kernels_.packed_bytes[numerics](tokens, columns));
        scratch_.emplace(kernels_.scratch_bytes(columns));
    }

    int panels() const { return panels_; }

    void run(const float* x, const Epilogue& epilogue) const {
        kernels_.pack[numerics_](x, matrix_.columns, matrix_.columns, tokens_, 0, tokens_, input_->bytes());
        MatmulJob job{&matrix_, input_->bytes(), tokens_, epilogue};
        kernels_.matmul[numerics_](job, 0, units_, scratch_->bytes());
    }

  private:
    const Kernels& kernels_;
    int numerics_, tokens_, units_, panels_;
    Matrix matrix_;
    std::optional<Buffer> input_, scratch_;
};

Result matmul(const std::string& isa, int numerics, int layout, Bytes weights, int rows, int columns, Rows x,
              std::optional<Vector> bias, int activation, bool gated, std::optional<Rows> residual) {
    int tokens = int(x.shape(0)), width = gated ? rows / 2 : rows;
    require(int(x.shape(1)) == columns, "x has the wrong number of columns");
    require(activation >= 0 && activation <= int(Activation::SwigluOai), "no such activation");
    BoundMatmul bound(isa, numerics, layout, weights, rows, columns, tokens, gated);
    std::vector<float> padded(size_t(bound.panels() * kPanelRows));
    if (bias) {
        require(bias->size() <= padded.size(), "the bias is too long");
        memcpy(padded.data(), bias->data(), bias->size() * sizeof(float));
    }
    size_t values = size_t(tokens) * size_t(width);
    float* out = new float[values];
    nb::capsule owner(out, [](void* data) noexcept { delete[] static_cast<float*>(data); });
    if (residual) {
        require(residual->size() == values, "the residual has the wrong shape");
        memcpy(out, residual->data(), values * sizeof(float));
    }
    const float* biases = bias ? padded.data() : nullptr;
    bound.run(x.data(), {out, width, biases, Activation(activation), gated, residual.has_value()});
    return Result(out, {size_t(tokens), size_t(width)}, owner);
}

nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> requantize(const std::string& isa, int layout, Bytes weights,
                                                        int rows, int columns) {
    const Kernels& kernels = kernels_named(isa);
    require(kernels.requantize_panel, "this instruction set has no per-channel int8 matmul");
    require(layout >= 0 && layout <= int(Layout::F32), "no such layout");
    const Matrix from{Layout(layout), rows, columns, weights.data()};
    require(rows > 0 && columns > 0 && from.bytes() <= weights.size(), "the weights are too short");
    const Matrix to{Layout::I8, rows, columns, nullptr};
    const size_t panels = weights.size() / from.stride();
    Buffer values(size_t(round_up(columns, kTileColumns)) * kPanelRows * sizeof(float));
    uint8_t* out = static_cast<uint8_t*>(aligned_alloc(64, panels * to.stride()));
    if (!out) throw std::bad_alloc();
    nb::capsule owner(out, [](void* data) noexcept { free(data); });
    for (size_t panel = 0; panel < panels; panel++)
        kernels.requantize_panel(from, int(panel), values.floats(), out + panel * to.stride());
    return {out, {panels * to.stride()}, owner};
}

double bench_matmul(const std::string& isa, int numerics, int layout, Bytes weights, int rows, int columns,
                    int tokens, int repeats) {
    BoundMatmul bound(isa, numerics, layout, weights, rows, columns, tokens, false);
    Buffer x(size_t(tokens) * size_t(columns) * sizeof(float));
    for (int i = 0; i < tokens * columns; i++) x.floats()[i] = float(i * 7919 % 2003 - 1001) / 1001;
    Buffer out(size_t(tokens) * size_t(rows) * sizeof(float));
    double best = 1e30;
    nb::gil_scoped_release unlocked;
    for (int i = 0; i < repeats; i++) {
        auto start = std::chrono::steady_clock::now();
        bound.run(x.floats(), {out.floats(), rows, nullptr, Activation::None, false, false});
        std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        best = took.count() < best ? took.count() : best;
    }
    return best;
}

}  // namespace

void bind_matmul(nb::module_& module) {
    using namespace nb::literals;
    module.def("has_bf16", [](const std::string& isa) { return kernels_named(isa).has_bf16; }, "isa"_a);
    module.def(
        "has_int8_attention", [](const std::string& isa) { return kernels_named(isa).has_int8_attention; },
        "isa"_a);
    module.def(
        "prefers_int8_cache", [](const std::string& isa) { return kernels_named(isa).prefers_int8_cache; },
        "isa"_a);
    module.def(
        "has_per_channel",
        [](const std::string& isa) { return kernels_named(isa).requantize_panel != nullptr; }, "isa"_a,
        "Whether there is a matmul over int8 weights with one scale per output channel.");
    module.def("requantize", &requantize, "isa"_a, "layout"_a, "weights"_a, "rows"_a, "columns"_a);
    // If `gated`, the panels are (gate, up) pairs, `rows` counts the rows of gate and up together,
    // and `bias` is in the order of the panels.
    module.def("matmul", &matmul, "isa"_a, "numerics"_a, "layout"_a, "weights"_a, "rows"_a, "columns"_a,
               "x"_a, "bias"_a.none(), "activation"_a, "gated"_a, "residual"_a.none());
    // Runs a matmul `repeats` times on the calling thread. Returns the seconds of the fastest run,
    // which include packing the activations.
    module.def("bench_matmul", &bench_matmul, "isa"_a, "numerics"_a, "layout"_a, "weights"_a, "rows"_a,
               "columns"_a, "tokens"_a, "repeats"_a);
}

}  // namespace engine
