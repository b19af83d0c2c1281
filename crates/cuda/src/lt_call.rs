//! The descriptors with which cuBLASLt is told about a product.

use crate::{
    driver::failed_library,
    lt::{Kind, Product, WORKSPACE_BYTES},
    matrix::Matrix,
};
use brigade_device::{DataType, Error, Result};
use cudarc::{
    cublas::sys::cublasOperation_t,
    cublaslt::{result, sys},
};
use std::ptr;

/// The descriptors of one product.
pub(crate) struct Call {
    pub(crate) description: Description,
    pub(crate) a: Layout,
    pub(crate) b: Layout,
    pub(crate) c: Layout,
    pub(crate) d: Layout,
}

impl Call {
    pub(crate) fn new(p: &Product<'_>) -> Result<Self> {
        use sys::{
            cublasComputeType_t as Compute, cublasLtMatmulDescAttributes_t as Attribute,
            cudaDataType_t as Type,
        };
        let (compute, scale) = if p.of_integers() {
            (Compute::CUBLAS_COMPUTE_32I, Type::CUDA_R_32I)
        } else {
            (Compute::CUBLAS_COMPUTE_32F, Type::CUDA_R_32F)
        };
        let description = result::create_matmul_desc(compute, scale)
            .map(Description)
            .map_err(failed_library("cublasLtMatmulDescCreate"))?;
        // The library's A is our B.
        description.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, transpose(p.b))?;
        description.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, transpose(p.a))?;
        if let Some(bias) = p.bias {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32;
            description.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue)?;
            description.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias.address())?;
        }
        if let Some([a, b]) = p.scales {
            description.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, b.address())?;
            description.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, a.address())?;
        }
        if let Some(cap) = p.sm_cap {
            let target = Attribute::CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET;
            description.set(target, i32::from(cap))?;
        }
        Ok(Self {
            description,
            a: Layout::new(p.a, p.batch)?,
            b: Layout::new(p.b, p.batch)?,
            c: Layout::new(p.c.unwrap_or(p.d), p.batch)?,
            d: Layout::new(p.d, p.batch)?,
        })
    }
}

fn transpose(m: &Matrix) -> i32 {
    if m.transposed() {
        cublasOperation_t::CUBLAS_OP_T as i32
    } else {
        cublasOperation_t::CUBLAS_OP_N as i32
    }
}

/// What is to be computed.
pub(crate) struct Description(pub(crate) sys::cublasLtMatmulDesc_t);

impl Description {
    fn set<T: Copy>(&self, what: sys::cublasLtMatmulDescAttributes_t, value: T) -> Result<()> {
        let from = ptr::from_ref(&value).cast();
        // SAFETY: the descriptor is alive, and the library copies the value, whose type is the attribute's.
        unsafe { result::set_matmul_desc_attribute(self.0, what, from, size_of::<T>()) }
            .map_err(failed_library("cublasLtMatmulDescSetAttribute"))
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

/// How a matrix lies in memory.
pub(crate) struct Layout(pub(crate) sys::cublasLtMatrixLayout_t);

impl Layout {
    fn new(m: &Matrix, batch: usize) -> Result<Self> {
        use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
        let (rows, columns) = m.stored();
        let dtype = data_type(m.dtype())?;
        // A row of ours is a column of the library's.
        let layout =
            result::create_matrix_layout(dtype, columns as u64, rows as u64, m.stride() as i64)
                .map(Self)
                .map_err(failed_library("cublasLtMatrixLayoutCreate"))?;
        if batch > 1 {
            layout.set(Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, batch as i32)?;
            let offset = Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
            layout.set(offset, m.batch_stride() as i64)?;
        }
        Ok(layout)
    }

    fn set<T: Copy>(&self, what: sys::cublasLtMatrixLayoutAttribute_t, value: T) -> Result<()> {
        let from = ptr::from_ref(&value).cast();
        // SAFETY: as for a description.
        unsafe { result::set_matrix_layout_attribute(self.0, what, from, size_of::<T>()) }
            .map_err(failed_library("cublasLtMatrixLayoutSetAttribute"))
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

/// What an algorithm may take for granted, and what it may not do.
pub(crate) struct Preference(pub(crate) sys::cublasLtMatmulPreference_t);

impl Preference {
    pub(crate) fn new(kind: &Kind) -> Result<Self> {
        use sys::{
            cublasLtMatmulPreferenceAttributes_t as Attribute,
            cublasLtReductionScheme_t as Reduction,
        };
        let preference = result::create_matmul_pref()
            .map(Self)
            .map_err(failed_library("cublasLtMatmulPreferenceCreate"))?;
        let workspace = Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        preference.set(workspace, WORKSPACE_BYTES as u64)?;
        // Parts of a split K are added in the type of the sum, never in that of the result: one rounding. Adding in place would round
        // each part, and its blocks wait for each other without a bound.
        preference.set(
            Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
            Reduction::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32,
        )?;
        let [a, b, c, d] = &kind.operands;
        for (what, operand) in [
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, d),
        ] {
            preference.set(what, operand.alignment)?;
        }
        Ok(preference)
    }

    fn set<T: Copy>(
        &self,
        what: sys::cublasLtMatmulPreferenceAttributes_t,
        value: T,
    ) -> Result<()> {
        let from = ptr::from_ref(&value).cast();
        // SAFETY: as for a description.
        unsafe { result::set_matmul_pref_attribute(self.0, what, from, size_of::<T>()) }
            .map_err(failed_library("cublasLtMatmulPreferenceSetAttribute"))
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}

fn data_type(dtype: DataType) -> Result<sys::cudaDataType> {
    use sys::cudaDataType_t as Type;
    Ok(match dtype {
        DataType::F32 => Type::CUDA_R_32F,
        DataType::F16 => Type::CUDA_R_16F,
        DataType::BF16 => Type::CUDA_R_16BF,
        DataType::I8 => Type::CUDA_R_8I,
        DataType::I32 => Type::CUDA_R_32I,
        DataType::F8E4M3 => Type::CUDA_R_8F_E4M3,
        other => {
            let want = "a type that cuBLASLt multiplies";
            return Err(Error::invalid("dtype", other, want));
        }
    })
}
