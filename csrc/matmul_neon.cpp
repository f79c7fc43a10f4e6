// Products of INT8 numerics in NEON: up to eight rows of activations share what is read of the weights.
//
// Of an input's values and a group's (a half's, where halves have scales) the exact dot product is multiplied
// by the input's scale, and then to a row's sum are added, in this order and rounded once each:
//     product * scale,  input sum * minimum
// where an offset of 128 is a minimum of 128 * scale more. What can be loaded is loaded rather than copied or
// broadcast, since that needs the units that multiply.
#include "decode_weight.h"
#include "dispatch.h"
#include "epilogue.h"
#include "packed_input_neon.h"
#include "repeat.h"
#include "with_layout.h"

namespace engine {
namespace {

constexpr int kBlock = 8;  // rows of activations
constexpr int kVectors = kPanelRows / 4;

alignas(16) const int32_t kNoDots[4] = {kShiftBits, kShiftBits, kShiftBits, kShiftBits};

// As an intrinsic it would become a copy of a register that holds the constant.
ENGINE_INLINE int32x4_t no_dots() {
    int32x4_t dots;
    __asm__ volatile("ldr %q0, %1" : "=w"(dots) : "m"(kNoDots));
    return dots;
}

// Four values of each of four rows, from the half of the group that begins with value 16 * half.
template <Layout layout>
ENGINE_INLINE int8x16_t load_values(const uint8_t* group, int half, int quad) {
    if (!is_4_bit(layout)) {
        uint8x16_t bytes = vld1q_u8(group + (4 * half + quad) * 64);
        return vreinterpretq_s8_u8(veorq_u8(bytes, vdupq_n_u8(128)));
    }
    uint8x16_t bytes = vld1q_u8(group + quad * 64);
    return vreinterpretq_s8_u8(half ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15)));
}

// dots[r] += values 4 * quad and on of row r * weights
template <int quad, int rows, int vectors>
ENGINE_INLINE void add_products(const int8x16_t (&weights)[vectors], const int8x16_t (&x)[rows],
                                int32x4_t (&dots)[rows][vectors]) {
    repeat<rows>([&](auto r) ALWAYS {
        repeat<vectors>([&](auto v)
                            ALWAYS { dots[r][v] = vdotq_laneq_s32(dots[r][v], weights[v], x[r], quad); });
    });
}

// The products of a half of a group.
template <Layout layout, int half, int rows, int vectors>
ENGINE_INLINE void add_half(const uint8_t* group, const InputGroup* const (&x)[rows],
                            int32x4_t (&dots)[rows][vectors]) {
    int8x16_t values[rows];
    repeat<rows>([&](auto r) ALWAYS { values[r] = vld1q_s8(x[r]->values + 16 * half); });
    repeat<4>([&](auto quad) ALWAYS {
        int8x16_t weights[vectors];
        repeat<vectors>([&](auto v) ALWAYS { weights[v] = load_values<layout>(group + 16 * v, half, quad); });
        add_products<quad>(weights, values, dots);
    });
}

// Scales the dot products of a share (both halves of a group, or one) and adds them up.
template <Layout layout, int half, int rows, int vectors>
ENGINE_INLINE void add_scaled(const uint16_t* scales, const InputGroup* const (&x)[rows],
                              int32x4_t (&dots)[rows][vectors], float32x4_t (&sums)[rows][vectors]) {
    constexpr int kSum = shares(layout) == 2 ? 2 + half : 1;  // its place behind InputGroup::scale
    float32x4_t scale[vectors], minimum[vectors];
    repeat<vectors>([&](auto v) ALWAYS {
        scale[v] = load_halves(scales + 4 * v);
        if (has_minima(layout)) minimum[v] = load_halves(scales + shares(layout) * kPanelRows + 4 * v);
        if (layout == Layout::Q8M) minimum[v] = vfmaq_n_f32(minimum[v], scale[v], 128.0f);
    });
    repeat<rows>([&](auto r) ALWAYS {
        float32x4_t factors = vld1q_f32(&x[r]->scale);
        repeat<vectors>([&](auto v) ALWAYS {
            float32x4_t product = vld1q_f32(x[r]->shift);
            product = vfmaq_laneq_f32(product, vreinterpretq_f32_s32(dots[r][v]), factors, 0);
            sums[r][v] = vfmaq_f32(sums[r][v], product, scale[v]);
            if (has_minima(layout)) sums[r][v] = vfmaq_laneq_f32(sums[r][v], minimum[v], factors, kSum);
        });
    });
}

// `vectors` times four outputs of a panel with `rows` rows of activations; row r's sums go to out + 32 r.
template <Layout layout, int rows, int vectors>
ENGINE_INLINE void multiply_strip(const uint8_t* panel, int first, int groups, const InputGroup* input,
                                  float* out) {
    float32x4_t sums[rows][vectors];
    const InputGroup* x[rows];
    repeat<rows>([&](auto r) ALWAYS {
        x[r] = input + size_t(r) * size_t(groups);
        repeat<vectors>([&](auto v) ALWAYS { sums[r][v] = vdupq_n_f32(0); });
    });
    for (int g = 0; g < groups; g++) {
        const uint8_t* group = panel + size_t(g) * group_bytes(layout) + 16 * first;
        const uint16_t* scales = scales_of<layout>(panel, groups, g) + 4 * first;
        int32x4_t dots[rows][vectors];
        auto clear = [&] {
            repeat<rows * vectors>([&](auto i) ALWAYS { dots[i / vectors][i % vectors] = no_dots(); });
        };
        clear();
        add_half<layout, 0>(group, x, dots);
        if constexpr (shares(layout) == 2) {
            add_scaled<layout, 0>(scales, x, dots, sums);
            clear();
        }
        add_half<layout, 1>(group, x, dots);
        add_scaled<layout, 1>(scales + (shares(layout) - 1) * kPanelRows, x, dots, sums);
        repeat<rows>([&](auto r) ALWAYS { x[r]++; });
    }
    repeat<rows * vectors>([&](auto i) ALWAYS {
        vst1q_f32(out + i / vectors * 2 * kPanelRows + i % vectors * 4, sums[i / vectors][i % vectors]);
    });
}

// Sums, dot products and inputs of so many fit into 32 registers.
constexpr int vectors_for(int rows) {
    return rows < 3 ? 4 : rows < 5 ? 2 : 1;
}

template <Layout layout, int rows>
void multiply_panel(const uint8_t* panel, int groups, const InputGroup* input, float* out) {
    constexpr int vectors = vectors_for(rows);
    for (int first = 0; first < kVectors; first += vectors)
        multiply_strip<layout, rows, vectors>(panel, first, groups, input, out + 4 * first);
}

template <Layout layout>
void multiply_units(const MatmulJob& job, int begin, int end) {
    using Multiply = void (*)(const uint8_t*, int, const InputGroup*, float*);
    constexpr Multiply multiply[] = {multiply_panel<layout, 1>, multiply_panel<layout, 2>,
                                     multiply_panel<layout, 3>, multiply_panel<layout, 4>,
                                     multiply_panel<layout, 5>, multiply_panel<layout, 6>,
                                     multiply_panel<layout, 7>, multiply_panel<layout, 8>};
    const Matrix& weights = *job.weights;
    int groups = weights.groups(), panels = job.epilogue.gated ? 2 : 1;
    auto input = reinterpret_cast<const InputGroup*>(job.input);
    for (int unit = begin; unit < end; unit++)
        for (int row = 0; row < job.rows; row += kBlock) {
            int rows = job.rows - row < kBlock ? job.rows - row : kBlock;
            float sums[kBlock][2 * kPanelRows];
            for (int i = 0; i < panels; i++)
                multiply[rows - 1](weights.panel(unit * panels + i), groups,
                                   input + size_t(row) * size_t(groups), sums[0] + i * kPanelRows);
            for (int r = 0; r < rows; r++) finish_unit(job, unit, row + r, sums[r]);
        }
}

void matmul_int8(const MatmulJob& job, int begin, int end, uint8_t*) {
    with_layout(job.weights->layout, [&](auto layout) {
        if constexpr (layout < Layout::F16) multiply_units<layout>(job, begin, end);
    });
}

}  // namespace

void fill_matmul_neon(Kernels& table) {
    constexpr int whole = int(Numerics::INT8);
    table.packed_bytes[whole] = packed_bytes_int8;
    table.pack[whole] = pack_int8;
    table.matmul[whole] = matmul_int8;
}

}  // namespace engine
