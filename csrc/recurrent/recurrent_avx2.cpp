// The kernels of layers that keep a state, for AVX2.
#include "base/dispatch.h"
#include "recurrent/recurrent_kernels.h"

namespace engine {

void fill_recurrent_avx2(Kernels& table) {
    fill_recurrent(table);
}

}  // namespace engine
