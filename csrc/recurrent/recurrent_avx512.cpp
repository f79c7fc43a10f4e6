// The kernels of layers that keep a state, for AVX-512.
#include "base/dispatch.h"
#include "recurrent/recurrent_kernels.h"

namespace engine {

void fill_recurrent_avx512(Kernels& table) {
    fill_recurrent(table);
}

}  // namespace engine
