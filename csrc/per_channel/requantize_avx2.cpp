#include "base/dispatch.h"
#include "per_channel/requantize_panel.h"

namespace engine {

void fill_round_avx2(Kernels& table) {
    table.round_panel = round_panel;
}

}  // namespace engine
