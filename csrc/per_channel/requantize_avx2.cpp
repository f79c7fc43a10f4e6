#include "base/dispatch.h"
#include "per_channel/requantize_panel.h"

namespace engine {

void fill_requantize_avx2(Kernels& table) {
    table.requantize_panel = requantize_panel;
}

}  // namespace engine
