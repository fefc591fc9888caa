// Tensors as arguments: torch describes one to us by a plain C call, which costs a hundredth of asking its attributes.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "arrays.h"

namespace rq {

// The table of functions behind a tensor class' `__dlpack_c_exchange_api__` (DLPack 1.x, DLPackExchangeAPI): as far as
// it is used here.
struct ExchangeTable {
  uint32_t major, minor;
  const ExchangeTable* previous;
  void *allocate, *to_managed, *from_managed;
  int (*describe)(void* object, nanobind::dlpack::dltensor* out);  // without ownership; may be absent
};

inline struct {
  const ExchangeTable* table = nullptr;
  PyTypeObject* type = nullptr;
} exchange;

inline void read_tensors(nanobind::type_object type) {
  const nanobind::object capsule = type.attr("__dlpack_c_exchange_api__");
  const auto* table = static_cast<const ExchangeTable*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (!table) throw nanobind::python_error();
  while (table && table->major != 1) table = table->previous;
  if (!table || !table->describe) refuse("this version of torch does not describe tensors by DLPack 1");
  exchange.table = table;
  exchange.type = reinterpret_cast<PyTypeObject*>(type.inc_ref().ptr());  // for the life of the process
}

inline Dtype dtype_of(nanobind::dlpack::dtype dtype) {
  using Code = nanobind::dlpack::dtype_code;
  const auto is = [&](Code code, int bits) {
    return dtype.lanes == 1 && dtype.code == static_cast<uint8_t>(code) && dtype.bits == bits;
  };
  if (is(Code::Float, 32)) return Dtype::f32;
  if (is(Code::Bfloat, 16)) return Dtype::bf16;
  if (is(Code::Float, 16)) return Dtype::f16;
  if (is(Code::UInt, 8) || is(Code::Bool, 8)) return Dtype::u8;
  if (is(Code::Int, 32)) return Dtype::i32;
  return Dtype::other;  // which no kernel takes: the check that names the array refuses it
}

// False where the object is not a tensor that lies in this process' memory.
inline bool read_tensor(PyObject* object, Array& array) noexcept {
  if (!exchange.type || !PyObject_TypeCheck(object, exchange.type)) return false;
  nanobind::dlpack::dltensor tensor;
  if (exchange.table->describe(object, &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  if (tensor.device.device_type != nanobind::device::cpu::value || tensor.ndim > Dims::kMost) return false;
  bool empty = false;
  for (int32_t i = 0; i < tensor.ndim; i++) empty = empty || tensor.shape[i] == 0;
  if (!tensor.data && !empty) return false;  // a stand-in that only has a shape
  array.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  array.dtype = dtype_of(tensor.dtype);
  array.shape.count = array.strides.count = tensor.ndim;
  for (int32_t i = 0; i < tensor.ndim; i++) {
    array.shape.values[i] = tensor.shape[i];
    array.strides.values[i] = tensor.strides[i];
  }
  return true;
}

}  // namespace rq

template <>
struct nanobind::detail::type_caster<rq::Array> {
  NB_TYPE_CASTER(rq::Array, const_name("torch.Tensor"))

  bool from_python(handle source, uint32_t, cleanup_list*) noexcept { return rq::read_tensor(source.ptr(), value); }
  static handle from_cpp(const rq::Array&, rv_policy, cleanup_list*) noexcept { return handle(); }
};
