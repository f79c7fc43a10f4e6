#include "per_channel/requantized.h"

#include <algorithm>

namespace engine {
namespace {

constexpr int kPanelsAtOnce = 8;

size_t requantized_bytes(const StoredPanels& from) {
    return size_t(from.panels) * panel_bytes(Layout::I8, from.matrix->columns);
}

}  // namespace

RequantizedMatrices requantize_matrices(const Kernels& kernels, ThreadPool& pool,
                                        const std::vector<StoredPanels>& from) {
    size_t bytes = 0;
    int columns = 0;
    for (const StoredPanels& each : from) {
        bytes += requantized_bytes(each);
        columns = std::max(columns, round_up(each.matrix->columns, kTileColumns));
    }
    RequantizedMatrices requantized{Block(bytes), {}};
    std::vector<Block> values;
    for (int i = 0; i < pool.size(); i++) values.emplace_back(size_t(columns) * kPanelRows * sizeof(float));
    WorkQueue queue(pool.size(), pool.nodes());
    uint8_t* out = requantized.memory.data();
    for (const auto& [matrix, panels] : from) {
        const Matrix to{Layout::I8, matrix->rows, matrix->columns, out};
        queue.reset(panels, kPanelsAtOnce);
        pool.run([&, &stored = *matrix](int thread) {
            int begin, end;
            while (queue.take(thread, begin, end))
                for (int panel = begin; panel < end; panel++)
                    kernels.requantize_panel(stored, panel, values[size_t(thread)].floats(),
                                             out + size_t(panel) * to.stride());
        });
        requantized.matrices.push_back(to);
        out += size_t(panels) * to.stride();
    }
    return requantized;
}

}  // namespace engine
