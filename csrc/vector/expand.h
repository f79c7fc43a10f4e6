// The second matrices (B) of LoRA adapters. Each including file is compiled for one instruction set.
//
// With 8-bit values, the dot product of a group of ranks is an exact integer. It is multiplied by the scale of
// the row, then by that of the channel. The products of groups are added in ascending order.
#pragma once
#include "base/kernels.h"
#include "matmul/packed_input.h"
#include "vector/vectors.h"

namespace engine {
namespace {

// A group of ranks of A x, quantized to 8 bits. Its values are floats here: their products with 8-bit values, and
// sums of 32 products, are exact.
struct HiddenGroup {
    float values[kGroup];
    float scale;
};
static_assert(sizeof(HiddenGroup) <= sizeof(float) * kHiddenFloats);

// Calls write(packed group, index of the group) for each group of ranks.
template <class Write>
ENGINE_INLINE void for_hidden_groups(const RankPanel* parts, int num_parts, const float* hidden,
                                     const Write& write) {
    for (const RankPanel* part = parts; part < parts + num_parts; part++)
        for (int i = 0; i < part->byte_blocks(); i++) {
            const int first = i * kGroup, left = part->count - first;
            float x[kGroup] = {};
            memcpy(x, hidden + part->first + first, sizeof(float) * size_t(left < kGroup ? left : kGroup));
            PackedGroup packed;
            pack_group(x, packed);
            write(packed, part->group + i);
        }
}

void pack_hidden(const RankPanel* parts, int num_parts, const float* hidden, float* out) {
    for_hidden_groups(parts, num_parts, hidden, [&](const PackedGroup& packed, int index) {
        HiddenGroup& group = *reinterpret_cast<HiddenGroup*>(out + index * kHiddenFloats);
        for (int k = 0; k < kGroup; k++) group.values[k] = float(packed.values[k]);
        group.scale = packed.scale;
    });
}

// The sums of a row do not depend on R.
template <int R>
ENGINE_INLINE void expand_floats(const ExpandJob& job, const RankPanel& panel, int row, float* out) {
    const float* values = job.floats + panel.offset;
    const float* hidden = job.hidden + size_t(row) * size_t(job.hidden_stride) + panel.first;
    for (int lane = 0; lane < kPanelRows; lane += kLanes) {
        Floats sums[R] = {};
        for (int k = 0; k < panel.count; k++) {
            const Floats weight = load(values + k * kPanelRows + lane);
            for (int r = 0; r < R; r++) sums[r] += all(hidden[r * job.hidden_stride + k]) * weight;
        }
        for (int r = 0; r < R; r++) store(out + ptrdiff_t(row + r) * job.stride + lane, sums[r]);
    }
}

// Converts a word of kLanes channels to floats. A word has four ranks.
ENGINE_INLINE void load_ranks(const uint8_t* word, Floats (&ranks)[4]) {
    const Words bytes = load_words(word);
    for (int i = 0; i < 4; i++)
        ranks[i] = __builtin_convertvector((Ints)(bytes >> (8 * i) & 255), Floats) - 128.0f;
}

template <int R>
ENGINE_INLINE void expand_bytes(const ExpandJob& job, const RankPanel& panel, int row, float* out) {
    const float* hidden = job.hidden + size_t(row) * size_t(job.hidden_stride);
    for (int lane = 0; lane < kPanelRows; lane += kLanes) {
        const uint8_t* block = job.bytes + panel.offset;
        Floats sums[R] = {};
        for (int i = 0; i < panel.byte_blocks(); i++) {
            const int left = panel.count - i * kGroup, words = div_up(left < kGroup ? left : kGroup, 4);
            auto group = [&](int r) -> const HiddenGroup& {
                const float* at = hidden + r * job.hidden_stride + (panel.group + i) * kHiddenFloats;
                return *reinterpret_cast<const HiddenGroup*>(at);
            };
            Floats dots[R] = {};
            for (int word = 0; word < words; word++) {
                Floats ranks[4];
                load_ranks(block + 64 * word + 4 * lane, ranks);
                for (int k = 0; k < 4; k++)
                    for (int r = 0; r < R; r++) dots[r] += all(group(r).values[4 * word + k]) * ranks[k];
            }
            block += 64 * words;
            const Floats scale = load(reinterpret_cast<const float*>(block) + lane);
            for (int r = 0; r < R; r++) sums[r] += dots[r] * group(r).scale * scale;
            block += 64;
        }
        for (int r = 0; r < R; r++) store(out + ptrdiff_t(row + r) * job.stride + lane, sums[r]);
    }
}

// Calls rows(std::integral_constant<int, R>, panel, first row, output) for blocks of R rows of each panel.
template <class Rows>
ENGINE_INLINE void expand_panels(const ExpandJob& job, int begin, int end, const Rows& rows) {
    for (int p = begin; p < end; p++) {
        const RankPanel& panel = job.panels[p];
        // With many adapters, few rows share the values, and memory is what takes time. A prefetch past the
        // end of the values does nothing.
        constexpr int kAhead = 4096, kLine = 64;
        const char* values = job.floats ? reinterpret_cast<const char*>(job.floats + panel.offset)
                                        : reinterpret_cast<const char*>(job.bytes + panel.offset);
        const int size = job.floats ? panel.count * kLine : panel.bytes();
        for (int at = 0; at < size; at += kLine) __builtin_prefetch(values + kAhead + at);
        float* out = job.out + ptrdiff_t(p) * kPanelRows;
        int row = 0;
        for (; row + 8 <= job.rows; row += 8) rows(std::integral_constant<int, 8>{}, panel, row, out);
        if (row + 4 <= job.rows) rows(std::integral_constant<int, 4>{}, panel, row, out), row += 4;
        for (; row < job.rows; row++) rows(std::integral_constant<int, 1>{}, panel, row, out);
    }
}

void expand(const ExpandJob& job, int begin, int end) {
    if (job.floats)
        expand_panels(job, begin, end, [&](auto size, const RankPanel& panel, int row, float* out) ALWAYS {
            expand_floats<decltype(size)::value>(job, panel, row, out);
        });
    else
        expand_panels(job, begin, end, [&](auto size, const RankPanel& panel, int row, float* out) ALWAYS {
            expand_bytes<decltype(size)::value>(job, panel, row, out);
        });
}

ENGINE_INLINE void fill_expand(Kernels& table) {
    table.expand = expand;
    table.pack_hidden = pack_hidden;
}

}  // namespace
}  // namespace engine
