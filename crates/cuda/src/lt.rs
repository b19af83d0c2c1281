//! Products by cuBLASLt, which is loaded at run time. An algorithm is asked for once per kind of product and kept, with its descriptors.
//!
//! Matrices here are row-major, and the library's are column-major: it is given `D' = op(B)' op(A)'`.

use crate::{
    Missing,
    driver::{failed, failed_library, refused},
    lane::Lane,
    lt_call::{Call, Preference},
    matrix::Matrix,
    quiet::quiet,
};
use brigade_device::{DataType, Result};
use cudarc::{
    cublaslt::{
        result::{self, CublasError},
        sys,
    },
    driver::CudaContext,
};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::{
    collections::{HashMap, HashSet},
    ffi::c_void,
    ptr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

/// What the library may use beside its operands; NVIDIA's advice for Hopper.
pub(crate) const WORKSPACE_BYTES: usize = 32 << 20;

/// Kinds of products whose algorithm is kept. A program that makes more asks again.
const KEPT: usize = 4096;

/// The library, on one GPU. Never closed: see [`Opened`](crate::opened::Opened).
pub(crate) struct Lt {
    handle: sys::cublasLtHandle_t,
    /// The handle belongs to the context, which must not go either.
    context: Arc<CudaContext>,
    prepared: Mutex<HashMap<Kind, Option<Arc<Prepared>>>>,
    /// Algorithms that have run here, so that what they need is loaded.
    loaded: Mutex<HashSet<(Form, [u64; 8])>>,
}

/// What is kept of a kind of product. The library only reads it.
struct Prepared {
    call: Call,
    algorithm: sys::cublasLtMatmulAlgo_t,
    /// The algorithm has run here.
    loaded: AtomicBool,
}

// SAFETY: descriptors belong to no thread, and nobody changes those that are kept.
unsafe impl Send for Prepared {}
// SAFETY: as above.
unsafe impl Sync for Prepared {}

/// What of a product tells its kernel from those of the same algorithm: types and transposes of A, B and D, batch, bias.
type Form = ([(DataType, bool); 3], bool, bool);

// SAFETY: the library allows one handle on several threads at once.
unsafe impl Send for Lt {}
// SAFETY: as above.
unsafe impl Sync for Lt {}

/// `D = alpha op(A) op(B) + beta C + bias`, for each product of the batch.
#[derive(Clone, Debug)]
pub(crate) struct Product<'a> {
    pub(crate) a: &'a Matrix,
    pub(crate) b: &'a Matrix,
    pub(crate) c: Option<&'a Matrix>,
    pub(crate) d: &'a Matrix,
    pub(crate) batch: usize,
    pub(crate) alpha: f32,
    pub(crate) beta: f32,
    /// A row of D's type, aligned to 16 bytes.
    pub(crate) bias: Option<&'a Matrix>,
    /// One f32 each for A and B.
    pub(crate) scales: Option<[&'a Matrix; 2]>,
    pub(crate) sm_cap: Option<u16>,
}

impl<'a> Product<'a> {
    /// `D = op(A) op(B)`
    pub(crate) fn new(a: &'a Matrix, b: &'a Matrix, d: &'a Matrix) -> Self {
        Self {
            a,
            b,
            c: None,
            d,
            batch: 1,
            alpha: 1.0,
            beta: 0.0,
            bias: None,
            scales: None,
            sm_cap: None,
        }
    }

    /// Whether sums are exact integers.
    pub(crate) fn of_integers(&self) -> bool {
        self.d.dtype() == DataType::I32
    }
}

/// All that the choice of an algorithm depends on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Kind {
    /// A, B, C and D.
    pub(crate) operands: [Operand; 4],
    batch: usize,
    /// The library treats a C that is not read differently.
    reads_c: bool,
    bias: bool,
    scaled: bool,
    sm_cap: Option<u16>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Operand {
    dtype: DataType,
    rows: usize,
    columns: usize,
    stride: usize,
    batch_stride: usize,
    transposed: bool,
    /// The greatest power of two up to 16 that every matrix of the batch is aligned to. The widest loads need no more, and so the same algorithm
    /// is found wherever operands lie: on every rank, whose parts of a weight begin at different places.
    pub(crate) alignment: u32,
}

impl Operand {
    fn of(m: &Matrix) -> Self {
        let bytes = m.dtype().bytes();
        let together = m.address() | (m.batch_stride() * bytes) as u64;
        Self {
            dtype: m.dtype(),
            rows: m.rows(),
            columns: m.columns(),
            stride: m.stride(),
            batch_stride: m.batch_stride(),
            transposed: m.transposed(),
            alignment: 1 << together.trailing_zeros().min(4),
        }
    }
}

/// Whether the library was found.
pub(crate) fn is_there() -> bool {
    // cudarc looks only where it loads at run time, and then its function goes before that below.
    #[allow(unused_imports, reason = "cudarc may be linked")]
    use cudarc::cublaslt::sys::*;
    // SAFETY: loading runs the initializers of cuBLASLt, which ask nothing of the caller.
    unsafe { is_culib_present() }
}

/// Where another crate of the program has cudarc link its libraries (candle does), the program does not start without them.
#[allow(dead_code, reason = "cudarc's own goes before it")]
unsafe fn is_culib_present() -> bool {
    true
}

impl Kind {
    fn of(p: &Product<'_>) -> Self {
        Self {
            operands: [p.a, p.b, p.c.unwrap_or(p.d), p.d].map(Operand::of),
            batch: p.batch,
            reads_c: p.beta != 0.0,
            bias: p.bias.is_some(),
            scaled: p.scales.is_some(),
            sm_cap: p.sm_cap,
        }
    }
}

impl Lt {
    /// Opens the library on a GPU.
    pub(crate) fn open(context: &Arc<CudaContext>) -> Result<Self, Missing> {
        if !is_there() {
            return Err(Missing::Cublas);
        }
        context
            .bind_to_thread()
            .map_err(refused("cuCtxSetCurrent"))?;
        let handle = result::create_handle().map_err(|CublasError(code)| Missing::Refused {
            call: "cublasLtCreate",
            code: code as u32,
        })?;
        Ok(Self {
            handle,
            context: Arc::clone(context),
            prepared: Mutex::default(),
            loaded: Mutex::default(),
        })
    }

    /// Enqueues the product; `false`, and nothing is done, where the library has no algorithm for it.
    pub(crate) fn run(&self, lane: &Arc<Lane>, p: &Product<'_>) -> Result<bool> {
        self.context
            .bind_to_thread()
            .map_err(failed("cuCtxSetCurrent"))?;
        let Some(prepared) = self.prepared(p)? else {
            return Ok(false);
        };
        // Descriptors hold the addresses of a bias and of scales, if there are any.
        let own = match (p.bias, p.scales) {
            (None, None) => None,
            _ => Some(Call::new(p)?),
        };
        let call = own.as_ref().unwrap_or(&prepared.call);
        let algorithm = &prepared.algorithm;
        let parts = [Some(p.a), Some(p.b), Some(p.d), p.c, p.bias];
        let scales = p.scales.into_iter().flatten();
        let buffers: SmallVec<[_; 7]> = parts
            .into_iter()
            .flatten()
            .chain(scales)
            .map(Matrix::buffer)
            .collect();
        let (floats, integers) = ([p.alpha, p.beta], [1i32, 0]);
        let factors: [*const c_void; 2] = if p.of_integers() {
            integers.each_ref().map(|x| ptr::from_ref(x).cast())
        } else {
            floats.each_ref().map(|x| ptr::from_ref(x).cast())
        };
        let workspace = lane.workspace(WORKSPACE_BYTES)?;
        self.load(p, &prepared);
        lane.run(&buffers, |stream| {
            // SAFETY: the descriptors say what the matrices are, which lie in buffers that `run` keeps until the work is
            // done; the factors are read during the call, and the workspace is this stream's, or this graph's.
            unsafe {
                result::matmul(
                    self.handle,
                    call.description.0,
                    factors[0],
                    factors[1],
                    p.b.address() as *const c_void,
                    call.b.0,
                    p.a.address() as *const c_void,
                    call.a.0,
                    p.c.unwrap_or(p.d).address() as *const c_void,
                    call.c.0,
                    p.d.address() as *mut c_void,
                    call.d.0,
                    algorithm,
                    workspace as *mut c_void,
                    WORKSPACE_BYTES,
                    stream.cast(),
                )
            }
            .map_err(failed_library("cublasLtMatmul"))
        })?;
        Ok(true)
    }

    /// What an algorithm needs is loaded when it first runs: nobody may be waiting on the GPU then.
    fn load(&self, p: &Product<'_>, prepared: &Prepared) {
        if prepared.loaded.load(Ordering::Relaxed) {
            return;
        }
        let operands = [p.a, p.b, p.d].map(|m| (m.dtype(), m.transposed()));
        let form = (operands, p.batch > 1, p.bias.is_some());
        let key = (form, prepared.algorithm.data);
        if !self.loaded.lock().contains(&key) {
            quiet(self.context.ordinal());
            self.loaded.lock().insert(key);
        }
        prepared.loaded.store(true, Ordering::Relaxed);
    }

    /// What is known of the product's kind; `None` if there is no algorithm for it.
    fn prepared(&self, p: &Product<'_>) -> Result<Option<Arc<Prepared>>> {
        let kind = Kind::of(p);
        if let Some(known) = self.prepared.lock().get(&kind) {
            return Ok(known.clone());
        }
        let call = Call::new(p)?;
        let algorithm = self.algorithm(&kind, &call)?;
        let prepared = algorithm.map(|algorithm| {
            let loaded = AtomicBool::new(false);
            Arc::new(Prepared {
                call,
                algorithm,
                loaded,
            })
        });
        let mut all = self.prepared.lock();
        if all.len() >= KEPT {
            all.clear();
        }
        all.insert(kind, prepared.clone());
        Ok(prepared)
    }

    fn algorithm(&self, kind: &Kind, call: &Call) -> Result<Option<sys::cublasLtMatmulAlgo_t>> {
        use sys::cublasStatus_t::{CUBLAS_STATUS_INVALID_VALUE, CUBLAS_STATUS_NOT_SUPPORTED};
        let preference = Preference::new(kind)?;
        // SAFETY: all descriptors are alive.
        let found = unsafe {
            result::get_matmul_algo_heuristic(
                self.handle,
                call.description.0,
                call.b.0,
                call.a.0,
                call.c.0,
                call.d.0,
                preference.0,
            )
        };
        let algorithm = match found {
            Ok(found) => Some(found.algo),
            Err(CublasError(CUBLAS_STATUS_NOT_SUPPORTED | CUBLAS_STATUS_INVALID_VALUE)) => None,
            Err(e) => return Err(failed_library("cublasLtMatmulAlgoGetHeuristic")(e)),
        };
        tracing::debug!(?kind, found = algorithm.is_some(), "algorithm of a product");
        Ok(algorithm)
    }
}
