// Norms, RoPE and reductions over logits in AVX-512, and the second matrices of LoRA adapters with VNNI.
#include <immintrin.h>

#include "base/dispatch.h"
#include "base/unroll.h"
#include "vector/expand.h"
#include "vector/vector_kernels.h"

namespace engine {
namespace {

// A group of ranks of A x, quantized to 8 bits. The bytes of B have an offset of 128. `start` takes it back: it
// is -128 times the sum of the values.
struct HiddenWords {
    int32_t words[kGroup / 4];
    float scale;
    int32_t start;
};
static_assert(sizeof(HiddenWords) <= sizeof(float) * kHiddenFloats);

void pack_hidden_words(const RankPanel* parts, int num_parts, const float* hidden, float* out) {
    for_hidden_groups(parts, num_parts, hidden, [&](const PackedGroup& packed, int index) ALWAYS {
        HiddenWords& group = *reinterpret_cast<HiddenWords*>(out + index * kHiddenFloats);
        memcpy(group.words, packed.values, sizeof group.words);
        group.scale = packed.scale;
        group.start = -128 * (packed.sums[0] + packed.sums[1]);
    });
}

template <int R>
ENGINE_INLINE void expand_words(const ExpandJob& job, const RankPanel& panel, int row, float* out) {
    const uint8_t* block = job.bytes + panel.offset;
    const float* hidden = job.hidden + size_t(row) * size_t(job.hidden_stride) + panel.group * kHiddenFloats;
    __m512 sums[R];
    unroll<R>([&](auto r) ALWAYS { sums[r] = _mm512_setzero_ps(); });
    for (int left = panel.count; left > 0; left -= kGroup, hidden += kHiddenFloats) {
        auto group = [&](int r) ALWAYS -> const HiddenWords& {
            return *reinterpret_cast<const HiddenWords*>(hidden + r * job.hidden_stride);
        };
        const int words = div_up(left < kGroup ? left : kGroup, 4);
        __m512i dots[R];
        unroll<R>([&](auto r) ALWAYS { dots[r] = _mm512_set1_epi32(group(r).start); });
        for (int word = 0; word < words; word++, block += 64) {
            const __m512i bytes = _mm512_load_si512(block);
            unroll<R>([&](auto r) ALWAYS {
                dots[r] = _mm512_dpbusd_epi32(dots[r], bytes, _mm512_set1_epi32(group(r).words[word]));
            });
        }
        const __m512 scale = _mm512_load_ps(block);
        block += 64;
        unroll<R>([&](auto r) ALWAYS {
            const __m512 dot = _mm512_mul_ps(_mm512_cvtepi32_ps(dots[r]), _mm512_set1_ps(group(r).scale));
            sums[r] = _mm512_fmadd_ps(dot, scale, sums[r]);
        });
    }
    unroll<R>([&](auto r) ALWAYS { _mm512_storeu_ps(out + ptrdiff_t(row + r) * job.stride, sums[r]); });
}

void expand_vnni(const ExpandJob& job, int begin, int end) {
    if (job.floats) return expand(job, begin, end);
    expand_panels(job, begin, end, [&](auto size, const RankPanel& panel, int row, float* out) ALWAYS {
        expand_words<decltype(size)::value>(job, panel, row, out);
    });
}

}  // namespace

void fill_vector_avx512(Kernels& table) {
    fill_vector(table);
    fill_expand(table);
    table.expand = expand_vnni;
    table.pack_hidden = pack_hidden_words;
}

}  // namespace engine
