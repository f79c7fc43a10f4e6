// LoRA adapters: matrices of low rank that change the results of matmuls, for some rows of a batch.
//
// For a row x with adapter s, a matmul with the weights W gives W x + B (A x). A and B are those of the matmul
// in adapter s. A has one row per rank, B one column. If W is fused from several weights, A has the ranks of
// all of them, and B is block-diagonal: the channels of a weight have its own ranks only.
#pragma once
#include <vector>

#include "base/kernels.h"

namespace engine {

// Consecutive rows of a batch that have the same adapter.
struct AdapterRun {
    int first, rows, adapter;
};

// Appends row `row` to the runs. Adapter 0 is the base model, which has no runs.
inline void extend_runs(std::vector<AdapterRun>& runs, int row, int adapter) {
    if (adapter == 0) return;
    const bool continues =
        !runs.empty() && runs.back().adapter == adapter && runs.back().first + runs.back().rows == row;
    if (continues)
        runs.back().rows++;
    else
        runs.push_back({row, 1, adapter});
}

struct AdapterMatrices {
    Matrix a{};                         // (ranks, K)
    Numerics numerics = Numerics::F32;  // of A x
    const RankPanel* panels = nullptr;  // B, by panels of output channels
    const float* floats = nullptr;
    const uint8_t* bytes = nullptr;
    std::vector<RankPanel> parts{};  // one panel of each part of B that has ranks
    Matrix whole{};                  // takes the place of the weights, with the same numerics as A x

    bool has_ranks() const { return a.rows > 0; }
    bool is_empty() const { return !has_ranks() && whole.rows == 0; }
    int num_groups() const { return parts.empty() ? 0 : parts.back().group + parts.back().byte_blocks(); }
};

// The change of the embedding table: the vector of token t is that of `table`, if there is one, and gets b a[t].
struct AdapterEmbedding {
    int rank = 0;
    const float* a = nullptr;      // (vocabulary, rank)
    const float* b = nullptr;      // (rank, hidden size)
    const float* table = nullptr;  // (vocabulary, hidden size)
};

struct LoadedAdapter {
    std::vector<AdapterMatrices> sites;  // by `Op::site`
    AdapterEmbedding embedding;
    bool is_loaded = false;
};

// The adapters of a model, by number. Number 0 is the base model.
struct AdapterSet {
    std::vector<LoadedAdapter> loaded;
    int max_rank = 0;    // rows of the highest a
    int max_groups = 0;  // groups of ranks of B, if its values are bytes

    // A row of A x: floats, then groups that `pack_hidden` has quantized.
    int row_floats() const { return max_rank + max_groups * kHiddenFloats; }

    bool has(int adapter) const {
        return adapter == 0 ||
               (adapter > 0 && size_t(adapter) < loaded.size() && loaded[size_t(adapter)].is_loaded);
    }
    const AdapterMatrices& matrices(int adapter, int site) const {
        return loaded[size_t(adapter)].sites[size_t(site)];
    }
};

}  // namespace engine
