#include "bindings/bind.hpp"

PYBIND11_MODULE(_native, module) {
  module.doc() = "The native engine; imported by kvstore_hvd.native only.";
  kvstore_hvd::bind_errors(module);
  kvstore_hvd::bind_segment(module);
  kvstore_hvd::bind_engine(module);
  kvstore_hvd::bind_reduce(module);
  kvstore_hvd::bind_link(module);
  kvstore_hvd::bind_mxnet(module);
}
