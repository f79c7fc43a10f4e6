// Compares the matmul kernels of each instruction set that the CPU has with the generic ones. It has no
// dependencies, so an emulator of another CPU can run it. Prints one line per instruction set. Exits with 1 if
// a result is off, or if an instruction set that is named on the command line is missing.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "base/kernels.h"

namespace {

using namespace engine;

struct Memory {
    explicit Memory(size_t size) : bytes(size + 128) {}
    uint8_t* at() { return bytes.data() + (64 - reinterpret_cast<uintptr_t>(bytes.data()) % 64) % 64; }
    std::vector<uint8_t> bytes;
};

std::mt19937 generator(1);

float normal() {
    static std::normal_distribution<float> draw;
    return draw(generator);
}

// Random panels. Every 16-bit part is a finite half or bfloat16 near 1 if it is read as one, which keeps
// scales valid in all layouts. Quantized values are any bytes.
void fill_weights(const Matrix& matrix, uint8_t* out) {
    for (size_t i = 0; i < matrix.bytes(); i++) out[i] = uint8_t(generator());
    const bool is_quantized = matrix.layout < Layout::F16;
    const size_t group = group_bytes(matrix.layout), values = is_4_bit(matrix.layout) ? 256 : 512;
    for (int p = 0; p < matrix.panels(); p++) {
        uint8_t* panel = out + size_t(p) * matrix.stride();
        auto write = [&](size_t begin, size_t end) {
            for (size_t i = begin; i + 1 < end; i += 2) {
                uint16_t half = float_to_half(normal() * 0.01f);
                if (matrix.layout == Layout::BF16) half = float_to_bf16(normal());
                memcpy(panel + i, &half, 2);
            }
        };
        if (matrix.layout == Layout::F32)
            for (size_t i = 0; i < matrix.stride(); i += 4) {
                float value = normal();
                memcpy(panel + i, &value, 4);
            }
        else if (!is_quantized)
            write(0, matrix.stride());
        else if (matrix.layout == Layout::Q8)
            write(size_t(matrix.groups()) * 512, matrix.stride());
        else
            for (int g = 0; g < matrix.groups(); g++)
                write(size_t(g) * group + values, size_t(g + 1) * group);
    }
}

std::vector<float> multiply(const Kernels& kernels, Numerics numerics, const Matrix& matrix,
                            const std::vector<float>& x, int rows, bool gated) {
    const int mode = int(numerics), width = gated ? matrix.rows / 2 : matrix.rows;
    const int units = gated ? matrix.panels() / 2 : matrix.panels();
    Memory input(kernels.packed_bytes[mode](rows, matrix.columns));
    Memory scratch(kernels.scratch_bytes(matrix.columns));
    std::vector<float> out(size_t(rows) * size_t(width), 1.0f);
    kernels.pack[mode](x.data(), matrix.columns, matrix.columns, rows, 0, rows, input.at());
    Epilogue epilogue{out.data(), width, nullptr, gated ? Activation::Silu : Activation::None, gated, true};
    kernels.matmul[mode]({&matrix, input.at(), rows, epilogue}, 0, units, scratch.at());
    return out;
}

// Activations of which some are large, so that there are outliers.
std::vector<float> activations(int count) {
    std::vector<float> x(static_cast<size_t>(count));
    for (float& value : x) value = normal() * (generator() % 50 == 0 ? 30.0f : 1.0f);
    return x;
}

double root_mean_square(const std::vector<float>& a, const std::vector<float>* b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); i++) sum += std::pow(double(a[i]) - (b ? double((*b)[i]) : 0.0), 2);
    return std::sqrt(sum / double(a.size()));
}

struct Mode {
    Numerics numerics, reference;  // `reference` is that of the generic kernels
    double tolerance;
};

// A copy of the matrix in layout I8, as the kernels make it.
Matrix requantized(const Kernels& kernels, const Matrix& from, Memory& memory) {
    Matrix to{Layout::I8, from.rows, from.columns, memory.at()};
    Memory values(size_t(round_up(from.columns, kTileColumns)) * kPanelRows * sizeof(float));
    for (int p = 0; p < from.panels(); p++)
        kernels.requantize_panel(from, p, reinterpret_cast<float*>(values.at()),
                                 memory.at() + size_t(p) * to.stride());
    return to;
}

// Returns the largest error of a mode, relative to its tolerance.
double check(const Kernels& generic, const Kernels& kernels, const Mode& mode, Layout layout) {
    double worst = 0;
    const int shapes[][3] = {{16, 32, 1}, {48, 576, 5}, {33, 100, 14}, {64, 192, 40}};
    for (const auto& [rows, columns, tokens] : shapes)
        for (bool gated : {false, true}) {
            if (gated && rows % 32 != 0) continue;
            Matrix matrix{layout, rows, columns, nullptr};
            Memory weights(matrix.bytes());
            fill_weights(matrix, weights.at());
            matrix.data = weights.at();
            const std::vector<float> x = activations(tokens * columns);
            auto want = multiply(generic, mode.reference, matrix, x, tokens, gated);
            const bool is_copy = mode.numerics == Numerics::INT8_PER_CHANNEL;
            Memory copy(is_copy ? size_t(matrix.panels()) * panel_bytes(Layout::I8, columns) : 0);
            const Matrix read = is_copy ? requantized(kernels, matrix, copy) : matrix;
            auto got = multiply(kernels, mode.numerics, read, x, tokens, gated);
            const double error = root_mean_square(got, &want) / root_mean_square(want, nullptr);
            worst = std::max(worst, std::isfinite(error) ? error / mode.tolerance : 1e9);
        }
    return worst;
}

// Whether two tables have the same INT8 results, bit for bit.
bool check_bits(const Kernels& first, const Kernels& second) {
    bool passed = true;
    for (Numerics numerics : {Numerics::INT8, Numerics::INT8_OUTLIERS})
        for (int layout = 0; layout < int(Layout::F16); layout++)
            for (int tokens : {1, 3, 4, 7, 12, 29}) {
                Matrix matrix{Layout(layout), 48, 200, nullptr};
                Memory weights(matrix.bytes());
                fill_weights(matrix, weights.at());
                matrix.data = weights.at();
                const std::vector<float> x = activations(tokens * matrix.columns);
                passed &= multiply(first, numerics, matrix, x, tokens, false) ==
                          multiply(second, numerics, matrix, x, tokens, false);
            }
    printf("%s: %s\n", second.name, passed ? "has the bits of the set before it" : "has OTHER BITS");
    return passed;
}

// B h of random 8-bit matrices B with two parts, as LoRA adapters have them.
std::vector<float> expanded(const Kernels& kernels, const std::vector<uint8_t>& values,
                            const std::vector<float>& hidden, int ranks, int rows) {
    const int groups = div_up(ranks, kGroup), stride = 2 * groups * kHiddenFloats;
    RankPanel panels[] = {{0, 0, ranks, 0}, {0, ranks, ranks, groups}};
    panels[1].offset = panels[0].bytes();
    Memory bytes(values.size());
    memcpy(bytes.at(), values.data(), values.size());
    std::vector<float> packed(size_t(rows * stride)), out(size_t(rows) * 2 * kPanelRows);
    for (int row = 0; row < rows; row++)
        kernels.pack_hidden(panels, 2, hidden.data() + row * 2 * ranks, packed.data() + row * stride);
    kernels.expand({panels, nullptr, bytes.at(), packed.data(), stride, rows, out.data(), 2 * kPanelRows}, 0,
                   2);
    return out;
}

bool check_expand(const Kernels& generic, const Kernels& kernels) {
    bool passed = true;
    for (int ranks : {1, 3, 16, 40})
        for (int rows : {1, 4, 13}) {
            const std::vector<float> hidden = activations(rows * 2 * ranks);
            const int bytes = RankPanel{0, 0, ranks, 0}.bytes(),
                      last = ranks % kGroup ? ranks % kGroup : kGroup;
            std::vector<uint8_t> values;
            for (int part = 0; part < 2; part++)
                for (int block = 0; block < div_up(ranks, kGroup); block++) {
                    const int words = div_up((block + 1) * kGroup <= ranks ? kGroup : last, 4);
                    for (int i = 0; i < 64 * words; i++) values.push_back(uint8_t(generator()));
                    for (int channel = 0; channel < kPanelRows; channel++) {
                        const float scale = std::fabs(normal());
                        const uint8_t* from = reinterpret_cast<const uint8_t*>(&scale);
                        values.insert(values.end(), from, from + sizeof scale);
                    }
                }
            passed &= values.size() == size_t(2 * bytes);
            auto want = expanded(generic, values, hidden, ranks, rows);
            auto got = expanded(kernels, values, hidden, ranks, rows);
            passed &= root_mean_square(got, &want) <= 1e-6 * root_mean_square(want, nullptr);
        }
    if (!passed) printf("  expand is off\n");
    return passed;
}

bool check_all(const Kernels& generic, const Kernels& kernels) {
    std::vector<Mode> modes = {{Numerics::F32, Numerics::F32, 1e-5},
                               {Numerics::INT8, Numerics::INT8, 1e-5},
                               {Numerics::INT8_OUTLIERS, Numerics::INT8_OUTLIERS, 1e-5}};
    if (kernels.has_bf16) modes.push_back({Numerics::BF16, Numerics::F32, 1e-2});
    // Activations and weights have 8 bits with one scale per row.
    if (kernels.requantize_panel) modes.push_back({Numerics::INT8_PER_CHANNEL, Numerics::F32, 6e-2});
    bool passed = check_expand(generic, kernels);
    for (const Mode& mode : modes)
        for (int layout = 0; layout < int(Layout::I8); layout++) {
            const bool is_int8 = mode.numerics == Numerics::INT8 || mode.numerics == Numerics::INT8_OUTLIERS;
            if (is_int8 && layout >= int(Layout::F16)) continue;
            const double worst = check(generic, kernels, mode, Layout(layout));
            if (worst <= 1) continue;
            passed = false;
            printf("  numerics %d, layout %d: %.3g times the tolerance\n", int(mode.numerics), layout, worst);
        }
    printf("%s: %s\n", kernels.name, passed ? "agrees with generic" : "FAILED");
    return passed;
}

}  // namespace

int main(int count, char** names) {
    const KernelSet& set = kernel_set();
    bool passed = true;
    for (int i = 1; i < set.count; i++) {
        const std::string name = set.tables[i]->name;
        passed &= check_all(*set.tables[0], *set.tables[i]);
        if (name == "i8mm" || name == "neon_bf16" || name == "avx_vnni")
            passed &= check_bits(*set.tables[i - 1], *set.tables[i]);
    }
    for (int wanted = 1; wanted < count; wanted++) {
        bool found = false;
        for (int i = 0; i < set.count; i++) found |= std::string(names[wanted]) == set.tables[i]->name;
        if (!found) printf("%s: this CPU does not have it\n", names[wanted]);
        passed &= found;
    }
    return passed ? 0 : 1;
}
