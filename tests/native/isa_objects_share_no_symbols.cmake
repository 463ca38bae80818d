# Each reduce_<isa>.cpp may export its kernel's getter and nothing else. Anything weak (an inline function or a template
# instance of a shared header) would be merged with the copies of other files, and the linker may keep the copy with
# AVX-512 instructions for every CPU.
#
#   cmake -DNM=nm "-DOBJECTS=a.o;b.o" -P isa_objects_share_no_symbols.cmake
set(examined 0)
foreach(object IN LISTS OBJECTS)
  if(NOT object MATCHES "reduce_(scalar|avx2|avx512)[.a-z]*")
    continue()
  endif()
  math(EXPR examined "${examined} + 1")
  execute_process(COMMAND ${NM} --extern-only --defined-only ${object} OUTPUT_VARIABLE symbols
    COMMAND_ERROR_IS_FATAL ANY)
  string(STRIP "${symbols}" symbols)
  string(REPLACE "\n" ";" symbols "${symbols}")
  foreach(symbol IN LISTS symbols)
    if(NOT symbol MATCHES "_kernelsEv$")
      message(SEND_ERROR "${object} exports ${symbol}")
    endif()
  endforeach()
endforeach()
if(NOT examined EQUAL 3)
  message(FATAL_ERROR "expected 3 objects of instruction sets, found ${examined} in: ${OBJECTS}")
endif()
