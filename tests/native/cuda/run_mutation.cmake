# Plants one fault, compiles the test program that must catch it, runs it, and fails unless that fails. A fault that
# changes nothing is the control: then the program must succeed.
#
#   cmake -DMUTATION=<name> -DTESTS=<folder of this file> -DCUDA=<native/cuda> -DWORK=<folder> -DLIBRARY=<libkvhvd.a>
#         -DCOMMAND=<compiler and options, a list> -P run_mutation.cmake
function(kvhvd_mutation name caught_by file old new)
  if(NOT name STREQUAL MUTATION)
    return()
  endif()
  set(folder ${WORK}/${name})
  file(REMOVE_RECURSE ${folder})
  file(COPY ${CUDA}/ ${TESTS}/ DESTINATION ${folder})
  file(READ ${folder}/${file} text)
  string(FIND "${text}" "${old}" first)
  string(FIND "${text}" "${old}" last REVERSE)
  if(first EQUAL -1 OR NOT first EQUAL last)
    message(FATAL_ERROR "${name}: what it replaces does not stand once in ${file}; adapt mutations.cmake")
  endif()
  string(REPLACE "${old}" "${new}" text "${text}")
  file(WRITE ${folder}/${file} "${text}")
  set(seconds 30)
  if(old STREQUAL new)
    set(seconds 5)
  endif()
  set(program test_gpu_kernels)
  if(caught_by STREQUAL "order")
    set(program test_gpu_order)
    set(caught_by "")
  endif()
  # One element type: the faults are not those of a type.
  execute_process(
    COMMAND ${COMMAND} -w -DKVHVD_ONLY=2 -I${folder} -I${TESTS} -I${TESTS}/.. ${folder}/${program}.cpp ${LIBRARY} -pthread
      -o ${folder}/${program}
    RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${name}: does not compile")
  endif()
  execute_process(
    COMMAND ${CMAKE_COMMAND} -E env KVHVD_TEST_SECONDS=${seconds} TSAN_OPTIONS=halt_on_error=1
      ${folder}/${program} ${caught_by}
    RESULT_VARIABLE result OUTPUT_QUIET ERROR_QUIET)
  if(old STREQUAL new)
    if(NOT result EQUAL 0)
      message(FATAL_ERROR "${name}: the program fails without a fault (${result})")
    endif()
  elseif(result EQUAL 0)
    message(FATAL_ERROR "${name}: nobody noticed")
  endif()
  message(STATUS "${name}: ${result}")
endfunction()

include(${TESTS}/mutations.cmake)
