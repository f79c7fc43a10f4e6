// Packs the matrices of LoRA adapters with 8 bits per value, for matmuls beside quantized weights.
#pragma once
#include <vector>

#include "base/layout.h"

namespace engine {

// A weight that the matmul is fused from: A (ranks, columns) and B (rows, ranks), both of floats.
struct LoraPart {
    const float *a, *b;
    int ranks, rows;
    uint8_t* expanding;  // B as bytes, see RankPanel in kernels.h; its panels have the same size
};

// The matrices of one matmul. `shrinking` are panels of layout Q8 with the ranks of all parts.
struct LoraSite {
    int columns;
    std::vector<LoraPart> parts;
    uint8_t* shrinking;
};

void pack_lora(const LoraSite& site);

// Bytes of a panel of B.
inline int expanding_bytes(int ranks) {
    return 64 * (div_up(ranks, 4) + div_up(ranks, kGroup));
}

}  // namespace engine
