// The loops of an INT8 GEMM over units and blocks of rows. The kernels of NEON, I8MM, AVX2 and AVX-VNNI use
// them; each multiplies a block of rows by one panel.
#pragma once
#include "matmul/epilogue.h"
#include "matmul/outliers.h"

namespace engine {
namespace {

// Calls multiply(panel, row, rows, sums) for each panel of units [begin, end) and each block of at most `block`
// rows. It must write the 16 accumulators of row r of the block to sums + 32 r. `kMaxBlock` is the largest
// block. All blocks of `pass` rows are multiplied by one unit after the other, so that their activations stay
// in the cache.
template <Layout layout, int kMaxBlock, class Multiply>
ENGINE_INLINE void multiply_units(const MatmulJob& job, int begin, int end, int pass, int block,
                                  uint8_t* scratch, Multiply multiply) {
    const int panels = job.epilogue.gated ? 2 : 1;
    OutlierUnit<layout>::collect(job, scratch);
    for (int first = 0; first < job.rows; first += pass) {
        const int last = first + pass < job.rows ? first + pass : job.rows;
        for (int unit = begin; unit < end; unit++) {
            OutlierUnit<layout> outliers(job, unit, scratch);
            outliers.prepare();
            for (int row = first; row < last; row += block) {
                const int rows = last - row < block ? last - row : block;
                float sums[kMaxBlock][2 * kPanelRows];
                prefetch_outputs(job, unit, row, rows);
                for (int i = 0; i < panels; i++)
                    multiply(job.weights->panel(unit * panels + i), row, rows, sums[0] + i * kPanelRows);
                for (int r = 0; r < rows; r++) {
                    outliers.add(row + r, sums[r]);
                    apply_epilogue(job, unit, row + r, sums[r]);
                }
            }
        }
    }
}

}  // namespace
}  // namespace engine
