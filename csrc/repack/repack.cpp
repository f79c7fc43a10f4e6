#include "repack/repack.h"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>

namespace engine {

namespace {

constexpr int kPanelsAtOnce = 4;
constexpr int kPieceColumns = 256;  // a multiple of all block sizes; 16 rows of so many columns fit into L1

// Fills a panel so that all its values dequantize to zero. In layouts whose bytes have an offset of
// 128, the byte 128 stands for zero.
void clear_panel(Layout layout, int columns, uint8_t* panel) {
    memset(panel, 0, panel_bytes(layout, columns));
    if (layout != Layout::Q8 && layout != Layout::Q8G16) return;
    for (int group = 0; group < div_up(columns, kGroup); group++)
        memset(panel + size_t(group) * group_bytes(layout), 128, kPanelRows * kGroup);
}

// Finds the stored tensor (part) that row `row` of the matrix comes from, and sets `row` to the row
// within this tensor. Returns null if the row is padding.
const StoredPart* find_row(const Repacking& matrix, int& row) {
    if (matrix.interleaved) {
        int panel = row / kPanelRows;
        row = panel / 2 * kPanelRows + row % kPanelRows;
        const StoredPart& part = matrix.parts[size_t(panel % 2)];
        return row < part.rows ? &part : nullptr;
    }
    for (const StoredPart& part : matrix.parts) {
        if (row < part.rows) return &part;
        row -= part.rows;
    }
    return nullptr;
}

// Where one row of a panel is stored in the checkpoint.
struct PanelRow {
    const StoredType* type;  // null: the row is padding
    const uint8_t* data;
    size_t block_stride;  // bytes from one block to the next; each float of a float type is a block
};

PanelRow locate(const Repacking& matrix, int row) {
    const StoredPart* part = find_row(matrix, row);
    if (!part) return {};
    const StoredType& type = *part->type;
    size_t stored = part->order ? size_t(part->order[row]) : size_t(row);
    size_t block = size_t(type.block_bytes);
    size_t apart = part->transposed ? size_t(part->rows) * block : block;
    size_t row_bytes = part->transposed ? block : type.bytes(size_t(matrix.columns));
    return {&type, part->data + stored * row_bytes, apart};
}

bool pack_panel(const Repacking& matrix, int panel) {
    uint8_t* out = matrix.out + size_t(panel) * panel_bytes(matrix.layout, matrix.columns);
    clear_panel(matrix.layout, matrix.columns, out);
    PanelRow rows[kPanelRows];
    for (int lane = 0; lane < kPanelRows; lane++) rows[lane] = locate(matrix, panel * kPanelRows + lane);
    bool accepted = true;
    for (int begin = 0; begin < matrix.columns; begin += kPieceColumns) {
        int end = std::min(begin + kPieceColumns, matrix.columns);
        for (int lane = 0; lane < kPanelRows; lane++) {
            const PanelRow& row = rows[lane];
            if (!row.type) continue;
            const uint8_t* data = row.data + size_t(begin / row.type->block_values) * row.block_stride;
            accepted &= row.type->pack({data, row.block_stride, begin, end, matrix.columns}, out, lane);
        }
    }
    return accepted;
}

// A queue of the panels of all matrices. Threads call `work` to pack panels until none are left.
class PanelQueue {
  public:
    explicit PanelQueue(const std::vector<Repacking>& matrices) : matrices_(matrices) {
        for (const Repacking& matrix : matrices) ends_.push_back(total() + matrix.panels());
    }

    void work() {
        for (;;) {
            int64_t begin = next_.fetch_add(kPanelsAtOnce);
            if (begin >= total()) return;
            int64_t end = std::min(begin + kPanelsAtOnce, total());
            for (int64_t panel = begin; panel < end; panel++) pack(panel);
        }
    }

    int refused() const { return refused_; }

  private:
    int64_t total() const { return ends_.empty() ? 0 : ends_.back(); }

    void pack(int64_t panel) {
        size_t index = size_t(std::upper_bound(ends_.begin(), ends_.end(), panel) - ends_.begin());
        int64_t first = index ? ends_[index - 1] : 0;
        if (!pack_panel(matrices_[index], int(panel - first))) refused_ = int(index);
    }

    const std::vector<Repacking>& matrices_;
    std::vector<int64_t> ends_;
    std::atomic<int64_t> next_{0};
    std::atomic<int> refused_{-1};
};

}  // namespace

int Repacking::rows() const {
    int total = 0;
    for (const StoredPart& part : parts) total += interleaved ? round_up(part.rows, kPanelRows) : part.rows;
    return total;
}

int repack(const std::vector<Repacking>& matrices, int threads) {
    PanelQueue queue(matrices);
    std::vector<std::thread> helpers;
    for (int i = 1; i < threads; i++) {
        try {
            helpers.emplace_back([&queue] { queue.work(); });
        } catch (const std::system_error&) {
            break;  // no more threads are available; the running ones do all the work
        }
    }
    queue.work();
    for (std::thread& helper : helpers) helper.join();
    return queue.refused();
}

}  // namespace engine
