// INT8 GEMM with AMX tiles, for steps with many rows. Its results are bit-identical to those of VNNI
// (matmul_avx512.cpp), which multiplies all other steps. Both read the same packed activations.
//
// The tile unit computes the integer dot products of a group, for up to 16 rows and one panel. They are
// stored, and the vector units scale them and add them to float accumulators, which stay in registers over
// all of K. While the tile unit multiplies a group, the vector units unpack the weights of a later group and
// scale the dot products of an earlier one.
//
// While tile instructions are in flight, port 5 takes no vector multiplies, so FMA and conversions run at half
// of their rate; integer operations do not. Hence dot products become floats by an integer addition.
#include "base/amx.h"
#include "base/dispatch.h"
#include "matmul/matmul_avx512.h"

namespace engine {
namespace {

constexpr int kTileRows = 16;
constexpr size_t kUnpackedBytes = 512;  // a group as a tile: 8 rows of 16 channels with 4 values each
constexpr int kAhead = 2;               // groups from the one that is unpacked to the one that is multiplied

// A panel of weights in the form of tiles. The tiles of 4-bit layouts are unpacked to memory.
template <Layout L>
struct PanelTiles {
    const uint8_t* panel;
    uint8_t* unpacked;
    int groups;

    ENGINE_UNROLLED const uint8_t* first() const { return is_4_bit(L) ? unpacked : panel; }
    ENGINE_UNROLLED size_t stride() const { return is_4_bit(L) ? kUnpackedBytes : group_bytes(L); }
    // Prefetches and unpacks a group. Only the first row tile of a panel does it.
    ENGINE_UNROLLED void fetch(int index) const {
        const size_t stream = L == Layout::Q8 ? 544 : group_bytes(L);  // Q8: including its scales
        prefetch_lines(panel + size_t(index) * stream, div_up(int(stream), 64));
        if (!is_4_bit(L) || index >= groups) return;
        const uint8_t* group = panel + size_t(index) * group_bytes(L);
        uint8_t* out = unpacked + size_t(index) * kUnpackedBytes;
        const __m512i mask = _mm512_set1_epi8(15), shifts = _mm512_set1_epi64(0x3c342c241c140c04);
        unroll<4>([&](auto quad) ENGINE_UNROLLED {
            const __m512i low = _mm512_load_si512(group + 64 * quad);
            const __m512i high = _mm512_multishift_epi64_epi8(shifts, low);  // vpsrlw would run on port 0
            _mm512_store_si512(out + 64 * quad, _mm512_and_si512(low, mask));
            _mm512_store_si512(out + 64 * (4 + quad), _mm512_and_si512(high, mask));
        });
    }
};

// Scales the dot products of a group and adds them to `sums`. Each operation rounds as in VNNI.
template <Layout L>
ENGINE_INLINE void add_group(__m512 (&sums)[kTileRows], const int32_t (&dots)[kTileRows][kPanelRows],
                             const PanelTiles<L>& weights, int index, const InputRows<kTileRows>& rows) {
    const Scales scales = load_scales<L>(weights.panel, weights.groups, index, 0);
    unroll<kTileRows>([&](auto i) ENGINE_UNROLLED {
        const InputGroup& group = rows.template at<InputGroup>(i);
        const __m512i dot = _mm512_add_epi32(_mm512_load_si512(dots[i]), _mm512_set1_epi32(kRoundShiftBits));
        __m512 product = _mm512_set1_ps(group.shift);
        __asm__("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(product) : "v"(dot), "m"(group.scale));
        sums[i] = _mm512_fmadd_ps(product, scales.scale, sums[i]);
        sums[i] = _mm512_fmadd_ps(_mm512_set1_ps(group.sum), scales.minimum, sums[i]);
    });
}

// Multiplies 16 rows by a panel with an even number of groups, and writes sums[row][16]. Even groups use other
// tile registers and memory than odd ones. A group is stored one step after its multiply, and scaled one step
// later.
template <Layout L, bool kNew>
void multiply_panel(const PanelTiles<L>& weights, const uint8_t* input, size_t stride, float* out) {
    alignas(64) int32_t dots[2][kTileRows][kPanelRows];
    InputRows<kTileRows> rows(input, stride);
    __m512 sums[kTileRows];
    unroll<kTileRows>([&](auto i) ENGINE_UNROLLED { sums[i] = _mm512_setzero_ps(); });
    const uint8_t* tile = weights.first();
    auto multiply = [&](int index, auto odd) ENGINE_UNROLLED {
        if constexpr (kNew) weights.fetch(index + kAhead);
        tile_load<4>(input, stride);
        tile_load<6 + odd>(tile);
        tile_zero<odd>();
        tile_multiply_mixed<odd, 4, 6 + odd>();
        input += sizeof(InputGroup);
        tile += weights.stride();
    };
    auto store = [&](auto odd) ENGINE_UNROLLED { tile_store<odd>(dots[odd]); };
    auto scale = [&](int index, auto odd) ENGINE_UNROLLED {
        add_group(sums, dots[odd], weights, index, rows);
        rows.advance(sizeof(InputGroup));
    };
    constexpr std::integral_constant<int, 0> even;
    constexpr std::integral_constant<int, 1> odd;
    for (int i = 0; kNew && i < kAhead; i++) weights.fetch(i);
    multiply(0, even);
    multiply(1, odd);
    store(even);
    for (int index = 2; index < weights.groups; index += 2) {
        multiply(index, even);
        store(odd);
        scale(index - 2, even);
        multiply(index + 1, odd);
        store(even);
        scale(index - 1, odd);
    }
    store(odd);
    scale(weights.groups - 2, even);
    scale(weights.groups - 1, odd);
    unroll<kTileRows>([&](auto i) ENGINE_UNROLLED { _mm512_store_ps(out + i * kPanelRows, sums[i]); });
}

// Multiplies rows [0, rows), which are whole row tiles, by units [begin, end).
template <Layout L>
void multiply_units(const MatmulJob& job, int rows, int begin, int end, uint8_t* scratch) {
    const int panels = job.epilogue.gated ? 2 : 1, groups = job.weights->groups();
    const size_t stride = size_t(groups) * sizeof(InputGroup);
    TileConfig config;
    config.row_bytes[4] = kGroup;
    config.rows[6] = config.rows[7] = kGroup / 4;
    const TileScope tiles(config);
    alignas(64) float sums[2 * kTileRows * kPanelRows];
    for (int unit = begin; unit < end; unit++)
        for (int row = 0; row < rows; row += kTileRows) {
            prefetch_outputs(job.epilogue, unit, row, kTileRows);
            for (int i = 0; i < panels; i++) {
                const PanelTiles<L> weights{job.weights->panel(unit * panels + i),
                                            scratch + size_t(i) * size_t(groups) * kUnpackedBytes, groups};
                const auto multiply = row == 0 ? multiply_panel<L, true> : multiply_panel<L, false>;
                multiply(weights, job.input + size_t(row) * stride, stride,
                         sums + i * kTileRows * kPanelRows);
            }
            store_block(job, unit, row, kTileRows, sums, kTileRows);
        }
}

void (*multiply_few)(const MatmulJob& job, int begin, int end, uint8_t* scratch);  // VNNI

// VNNI multiplies the rows after the last whole row tile, and what has two scales per group.
void matmul(const MatmulJob& job, int begin, int end, uint8_t* scratch) {
    const int groups = job.weights->groups(), rows = job.rows / kTileRows * kTileRows;
    int done = 0;
    with_layout(job.weights->layout, [&](auto layout) {
        if constexpr (layout < Layout::F16 && scales_per_group(layout) == 1) {
            if (rows == 0 || groups % 2 != 0) return;
            multiply_units<layout>(job, rows, begin, end, scratch);
            done = rows;
        }
    });
    if (done == job.rows) return;
    MatmulJob rest = job;
    rest.rows -= done;
    rest.input += size_t(done) * size_t(groups) * sizeof(InputGroup);
    rest.epilogue.out += ptrdiff_t(done) * rest.epilogue.stride;
    if (rest.epilogue.delta) rest.epilogue.delta += ptrdiff_t(done) * rest.epilogue.delta_stride;
    multiply_few(rest, begin, end, scratch);
}

}  // namespace

void fill_matmul_int8_amx(Kernels& table) {
    multiply_few = table.matmul[int(Numerics::INT8)];
    table.matmul[int(Numerics::INT8)] = matmul;
}

}  // namespace engine
