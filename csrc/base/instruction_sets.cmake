# Removes the files of other CPUs from ENGINE_SOURCES, and sets the compiler flags of the others.

# Apple's compiler builds for either family of CPUs, whichever it runs on.
set(ENGINE_PROCESSOR ${CMAKE_SYSTEM_PROCESSOR})
if(CMAKE_OSX_ARCHITECTURES)
  set(ENGINE_PROCESSOR ${CMAKE_OSX_ARCHITECTURES})
endif()
if(NOT ENGINE_PROCESSOR MATCHES "x86_64|AMD64")
  list(FILTER ENGINE_SOURCES EXCLUDE REGEX "_(avx2|avx512|avx512bf16|amx)\\.cpp$")
endif()
if(NOT ENGINE_PROCESSOR MATCHES "aarch64|arm64|ARM64")
  list(FILTER ENGINE_SOURCES EXCLUDE REGEX "_neon\\.cpp$")
endif()

# A file's name says which instructions it may use; everything else runs on any CPU of the family.
set(OPTIMIZATION -O3)
if(ENGINE_SANITIZE)
  set(OPTIMIZATION -O1)
endif()
set(GENERIC_FLAGS ${OPTIMIZATION})
set(AVX2_FLAGS ${OPTIMIZATION} -mavx2 -mfma -mf16c)
# GCC 12 takes the "undefined" operands of its own intrinsics for a mistake of ours.
set(AVX512_FLAGS ${AVX2_FLAGS} -Wno-uninitialized -Wno-maybe-uninitialized -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni)
set(AVX512BF16_FLAGS ${AVX512_FLAGS} -mavx512bf16)
set(AMX_FLAGS ${AVX512BF16_FLAGS} -mamx-tile -mamx-bf16 -mamx-int8)
set(NEON_FLAGS ${OPTIMIZATION} -march=armv8.2-a+dotprod+fp16 -mtune=neoverse-n1)
foreach(source IN LISTS ENGINE_SOURCES)
  foreach(instructions IN ITEMS GENERIC AVX2 AVX512 AVX512BF16 AMX NEON)
    string(TOLOWER ${instructions} suffix)
    if(source MATCHES "_${suffix}\\.cpp$")
      set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "${${instructions}_FLAGS}")
    endif()
  endforeach()
endforeach()
