//! Results in tensors that are there already. A step that writes nothing but those allocates nothing: where it is captured, no operation on memory stands
//! between its kernels, so one begins while the other ends.

use crate::{Parallel, error::invalid, memory};
use brigade::{Error, ViewMut};
use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Result, Storage, Tensor};
use parking_lot::Mutex;
use std::sync::Arc;

/// What a result is like.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Form<'a> {
    pub(crate) dtype: DType,
    /// Of the tensor.
    pub(crate) dims: &'a [usize],
    /// As the operation writes it.
    pub(crate) rows: [usize; 2],
}

/// candle's operation that writes a result.
struct Write<'a, F> {
    parallel: &'a Parallel,
    /// What a graph keeps.
    #[cfg_attr(
        not(feature = "cuda"),
        expect(dead_code, reason = "no graph has tensors of the host's memory")
    )]
    owner: Arc<Tensor>,
    form: Form<'a>,
    work: Mutex<Option<F>>,
}

impl<F: FnOnce(ViewMut<'_>) -> brigade::Result<()>> Write<'_, F> {
    fn run(&self, mut to: ViewMut<'_>) -> brigade::Result<()> {
        let work = self.work.lock().take().ok_or(Error::Closed)?;
        work(to.reshape(&self.form.rows)?)
    }
}

impl<F: FnOnce(ViewMut<'_>) -> brigade::Result<()>> InplaceOp1 for Write<'_, F> {
    fn name(&self) -> &'static str {
        "write"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        self.parallel.refuse_capture()?;
        memory::change_cpu(storage, layout, |to| self.run(to))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut candle_core::CudaStorage, layout: &Layout) -> Result<()> {
        let owner = Arc::clone(&self.owner);
        crate::cuda::change(storage, layout, owner, |to| self.run(to))
    }
}

/// Where candle has a tensor's storage, which has one lock for all its tensors.
fn storage_of(tensor: &Tensor) -> *const Storage {
    &raw const *tensor.storage_and_layout().0
}

impl Parallel {
    /// Checks that a result of this form can go to a tensor, which errors name so, while `others` are lent: before any of them is, since all tensors of a
    /// storage wait for its one lock.
    pub(crate) fn check_into(
        &self,
        (field, tensor): (&'static str, &Tensor),
        form: Form<'_>,
        others: &[&Tensor],
    ) -> Result<()> {
        self.check_place(tensor)?;
        if (tensor.dtype(), tensor.dims()) != (form.dtype, form.dims) {
            let got = format!("{:?} {:?}", tensor.dtype(), tensor.dims());
            return Err(invalid(
                field,
                got,
                format!("{:?} {:?}", form.dtype, form.dims),
            ));
        }
        let own = storage_of(tensor);
        if others.iter().any(|other| storage_of(other) == own) {
            let got = "memory of something else in the same call";
            return Err(invalid(field, got, "memory of its own"));
        }
        Ok(())
    }

    /// Lends `to`, which was [checked](Self::check_into), to `work` for writing.
    pub(crate) fn write(
        &self,
        to: &Tensor,
        form: Form<'_>,
        work: impl FnOnce(ViewMut<'_>) -> brigade::Result<()>,
    ) -> Result<()> {
        to.inplace_op1(&Write {
            parallel: self,
            owner: Arc::new(to.clone()),
            form,
            work: Mutex::new(Some(work)),
        })
    }
}
