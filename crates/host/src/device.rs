//! The host as a device: allocation, copies, streams and products.

use crate::{
    comm, element,
    gemm::{Matrix, Scratch, Workers},
    hierarchical,
    linear::{OwnedLinear, finish},
    memory::{Heap, reading, writing},
    operand::OwnedOperand,
    queue::{self, HostQueue},
    rail::RailModel,
};
use brigade_device::moves::{same_bytes, same_shape, same_type, transposed};
use brigade_device::{
    Activation, Allocate, Bootstrap, Buffer, Comm, CommConfig, DataType, Device, DeviceInfo, Error,
    GemmParams, GemmShape, GroupedGemmParams, Hierarchy, HierarchyConfig, Injector, Linear,
    LoraLinearParams, Machines, MemoryStatus, MemoryType, Operand, Output, QBuffer, QScheme,
    Queues, Replay, ResidualNormParams, Result, Shape, SiluMulParams, Stream, TopK, TopKParams,
    View, ViewMut, check_bias_activation,
};
use brigade_group::machine;
use brigade_plan::Entries;
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// How a host device is set up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostConfig {
    /// Threads that a product may use: the calling one, or a pool of the device's own. At most [`MOST_THREADS`](Self::MOST_THREADS).
    pub threads: usize,
    /// Number of the device, for reports.
    pub ordinal: u32,
    /// Largest copy or reduce-scatter, in bytes that arrive at a rank, that is pushed; the same on every rank. `None`, none of
    /// them, is quickest: it is for trying out what GPUs do.
    pub push_max_bytes: Option<usize>,
    /// How slow links between machines are, where this host plays several; `None` makes them as quick as its memory. The same on
    /// every rank.
    pub rail: Option<RailModel>,
    /// What `brigade-perf tune-hierarchical --device host` measured: it says what plans across machines take calls and rails for, before
    /// what this build has, and before `rail`. The same on every rank, or they form no hierarchy. Entries of GPUs say nothing of a host.
    pub entries: Entries,
    /// Asked at every step of the protocols, to try out delays and faults; `None` in earnest.
    pub inject: Option<Injector>,
}

impl HostConfig {
    /// Most threads of a device.
    pub const MOST_THREADS: usize = 1 << 10;
}

impl Default for HostConfig {
    fn default() -> Self {
        Self {
            threads: 1,
            ordinal: 0,
            push_max_bytes: None,
            rail: None,
            entries: Entries::default(),
            inject: None,
        }
    }
}

/// The CPU as one rank's accelerator.
///
/// A rank is a thread: its calls run at once, on the thread that makes them, and overlap comes from the communicator's
/// own communication thread.
pub struct HostDevice {
    info: DeviceInfo,
    held: Arc<AtomicU64>,
    pub(crate) push_max_bytes: Option<usize>,
    pub(crate) rail: Option<RailModel>,
    pub(crate) entries: Entries,
    pub(crate) inject: Option<Injector>,
    pub(crate) engine: Arc<Engine>,
}

/// What multiplies: shared with captured work.
pub(crate) struct Engine {
    pub(crate) workers: Workers,
    pub(crate) scratch: Scratch,
}

impl HostDevice {
    /// A device with one thread.
    ///
    /// # Errors
    /// As [`with`](Self::with).
    pub fn new() -> Result<Arc<Self>> {
        Self::with(&HostConfig::default())
    }

    /// A device as configured.
    ///
    /// # Errors
    /// [`Error::Invalid`] for no threads or too many, and a rail that cannot be; [`Error::Backend`] if threads cannot be started.
    pub fn with(config: &HostConfig) -> Result<Arc<Self>> {
        if !(1..=HostConfig::MOST_THREADS).contains(&config.threads) {
            let want = format!("1 to {}", HostConfig::MOST_THREADS);
            return Err(Error::invalid("threads", config.threads, want));
        }
        config.rail.map_or(Ok(()), RailModel::check)?;
        let workers = Workers::new(config.threads).map_err(|e| Error::Backend {
            call: "start worker threads",
            code: i64::try_from(config.threads).unwrap_or(i64::MAX),
            source: Some(Arc::new(e)),
        })?;
        Ok(Arc::new(Self {
            info: DeviceInfo {
                name: "host".into(),
                ordinal: config.ordinal,
                sms: u16::try_from(config.threads).unwrap_or(u16::MAX),
                memory_bytes: machine::total_bytes(),
            },
            held: Arc::default(),
            push_max_bytes: config.push_max_bytes,
            rail: config.rail,
            entries: config.entries.clone(),
            inject: config.inject.clone(),
            engine: Arc::new(Engine {
                workers,
                scratch: Scratch::default(),
            }),
        }))
    }

    /// The caller's buffer, or a new one.
    pub(crate) fn place(&self, output: Output<'_>, shape: &[usize]) -> Result<(Buffer, bool)> {
        output.check(shape)?;
        match output {
            Output::Into(v) => Ok((v.as_view().retain(), false)),
            Output::Allocate(dtype) => Ok((self.heap(dtype, shape)?, true)),
        }
    }

    pub(crate) fn heap(&self, dtype: DataType, shape: &[usize]) -> Result<Buffer> {
        let shape = Shape::new(shape)?;
        let heap = Heap::new(shape.len() * dtype.bytes(), &self.held)?;
        Buffer::new(Arc::new(heap), dtype, shape)
    }
}

impl Allocate for HostDevice {
    fn allocate(
        &self,
        on: &Stream,
        _memory: MemoryType,
        dtype: DataType,
        shape: &[usize],
    ) -> Result<Buffer> {
        HostQueue::of(on)?;
        self.heap(dtype, shape)
    }

    fn copy(&self, on: &Stream, to: ViewMut<'_>, from: View<'_>) -> Result<()> {
        same_shape(to.as_view(), from)?;
        same_type(to.as_view(), from)?;
        let (to, from) = (to.as_view().retain(), from.retain());
        HostQueue::of(on)?.run(move || {
            writing(&to, &[&from], |to, from| {
                to.copy_from_slice(from[0]);
                Ok(())
            })
        })
    }

    fn write(&self, on: &Stream, to: ViewMut<'_>, bytes: &[u8]) -> Result<()> {
        let to = to.as_view().retain();
        same_bytes(&to, bytes.len())?;
        let queue = HostQueue::of(on)?;
        queue.refuse_capture("a write from the caller's memory")?;
        writing(&to, &[], |to, _| {
            to.copy_from_slice(bytes);
            Ok(())
        })
    }

    fn read(&self, on: &Stream, from: View<'_>, bytes: &mut [u8]) -> Result<()> {
        let from = from.retain();
        same_bytes(&from, bytes.len())?;
        let queue = HostQueue::of(on)?;
        queue.refuse_capture("a read into the caller's memory")?;
        reading(&[&from], |from| {
            bytes.copy_from_slice(from[0]);
            Ok(())
        })
    }

    fn fill(&self, on: &Stream, to: ViewMut<'_>, byte: u8) -> Result<()> {
        let to = to.as_view().retain();
        HostQueue::of(on)?.run(move || {
            writing(&to, &[], |to, _| {
                to.fill(byte);
                Ok(())
            })
        })
    }

    fn convert(&self, on: &Stream, to: ViewMut<'_>, from: View<'_>) -> Result<()> {
        same_shape(to.as_view(), from)?;
        element::check_conversion(from.dtype(), to.dtype())?;
        let (to, from) = (to.as_view().retain(), from.retain());
        HostQueue::of(on)?.run(move || {
            writing(&to, &[&from], |bytes, inputs| {
                element::convert(from.dtype(), inputs[0], to.dtype(), bytes)
            })
        })
    }

    fn transpose(&self, on: &Stream, to: ViewMut<'_>, from: View<'_>) -> Result<()> {
        let (rows, columns) = transposed(to.as_view(), from)?;
        let (to, from) = (to.as_view().retain(), from.retain());
        HostQueue::of(on)?.run(move || {
            writing(&to, &[&from], |out, inputs| {
                let size = from.dtype().bytes();
                for i in 0..rows {
                    for j in 0..columns {
                        let source = &inputs[0][(i * columns + j) * size..][..size];
                        out[(j * rows + i) * size..][..size].copy_from_slice(source);
                    }
                }
                Ok(())
            })
        })
    }

    fn memory_status(&self) -> Result<MemoryStatus> {
        Ok(MemoryStatus {
            total_bytes: self.info.memory_bytes,
            free_bytes: machine::available_bytes(),
            held_bytes: self.held.load(Ordering::Relaxed),
        })
    }
}

impl Queues for HostDevice {
    fn stream(&self, _priority: i8) -> Result<Stream> {
        Ok(Stream::new(Arc::new(HostQueue::default())))
    }

    fn capture(
        &self,
        on: &Stream,
        work: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Box<dyn Replay>> {
        queue::capture(on, work)
    }
}

/// One product of a batch: its activations, its layer, and where its result lies.
struct Product {
    x: OwnedOperand,
    transpose_x: bool,
    linear: OwnedLinear,
    d: Buffer,
}

impl Product {
    fn run(&self, engine: &Engine) -> Result<()> {
        let mut inputs = self.linear.buffers();
        let x_at = inputs.len();
        inputs.extend(self.x.buffers());
        writing(&self.d, &inputs, |out, bytes| {
            let Engine { workers, scratch } = engine;
            let x = &mut bytes[x_at..].iter().copied();
            let x = self.x.bind(x, self.transpose_x, scratch)?;
            let x = if x.is_integer_rows() {
                x
            } else {
                x.for_rows(false, scratch)?
            };
            let linear = self
                .linear
                .bind(&bytes[..x_at], x.is_integer_rows(), scratch)?;
            linear.multiply(workers, &x, 0..x.rows(), self.d.dtype(), out)
        })
    }
}

impl HostDevice {
    fn products(p: &LoraLinearParams<'_>, shape: &GemmShape, d: &Buffer) -> Result<Vec<Product>> {
        let gemm = &p.gemm;
        let product = |gemm: &GemmParams<'_>, d: Buffer| {
            Ok(Product {
                x: OwnedOperand::new(&gemm.a)?,
                transpose_x: gemm.transpose_a,
                linear: OwnedLinear::new(gemm, p.runs)?,
                d,
            })
        };
        if shape.d.dims().len() == 2 {
            return Ok(vec![product(gemm, d.clone())?]);
        }
        let x = gemm.a.plain("a")?;
        let b = gemm.b.plain("b")?;
        (0..shape.batch)
            .map(|i| {
                let c = match gemm.c {
                    Some(c) if c.shape().dims().len() == 3 => Some(c.index(i)?),
                    c => c,
                };
                let one = GemmParams {
                    a: Operand::Plain(x.index(i)?),
                    b: Operand::Plain(b.index(i)?),
                    c,
                    ..*gemm
                };
                product(&one, d.index(i)?)
            })
            .collect()
    }
}

impl Linear for HostDevice {
    fn gemm(&self, on: &Stream, p: &GemmParams<'_>, output: Output<'_>) -> Result<Option<Buffer>> {
        self.lora_linear(
            on,
            &LoraLinearParams {
                gemm: *p,
                runs: &[],
            },
            output,
        )
    }

    fn quantize(&self, on: &Stream, a: View<'_>, scheme: QScheme) -> Result<QBuffer> {
        self.run_quantize(on, a, scheme)
    }

    fn bias_activation(
        &self,
        on: &Stream,
        from: View<'_>,
        bias: Option<View<'_>>,
        activation: Activation,
        output: Output<'_>,
    ) -> Result<Option<Buffer>> {
        check_bias_activation(from, bias, &output)?;
        let shape = from.shape();
        let n = shape.columns();
        let rows = shape.len().checked_div(n).unwrap_or(0);
        let (d, new) = self.place(output, shape.dims())?;
        let (out, from, bias) = (d.clone(), from.retain(), bias.map(|c| c.retain()));
        let engine = Arc::clone(&self.engine);
        HostQueue::of(on)?.run(move || {
            let inputs: Vec<&Buffer> = std::iter::once(&from).chain(&bias).collect();
            writing(&out, &inputs, |bytes, inputs| {
                let scratch = &engine.scratch;
                let bias = bias.as_ref().map(|c| {
                    let rows = c.shape().len().checked_div(n).unwrap_or(0);
                    Matrix::new(c.dtype(), inputs[1], [rows, n], false, scratch)
                });
                let bias = bias.transpose()?;
                let mut values = scratch.take(rows * n)?;
                element::load(from.dtype(), inputs[0], &mut values);
                finish(bias.as_ref(), 1.0, activation, 0..rows, n, &mut values);
                element::store(out.dtype(), &values, bytes);
                Ok(())
            })
        })?;
        Ok(new.then_some(d))
    }

    fn lora_linear(
        &self,
        on: &Stream,
        p: &LoraLinearParams<'_>,
        output: Output<'_>,
    ) -> Result<Option<Buffer>> {
        let shape = p.check()?;
        let (d, new) = self.place(output, shape.d.dims())?;
        let products = Self::products(p, &shape, &d)?;
        let engine = Arc::clone(&self.engine);
        HostQueue::of(on)?.run(move || products.iter().try_for_each(|p| p.run(&engine)))?;
        Ok(new.then_some(d))
    }

    fn grouped_gemm(
        &self,
        on: &Stream,
        p: &GroupedGemmParams<'_>,
        output: Output<'_>,
    ) -> Result<Option<Buffer>> {
        self.run_grouped_gemm(on, p, output)
    }

    fn silu_mul(
        &self,
        on: &Stream,
        p: &SiluMulParams<'_>,
        output: Output<'_>,
    ) -> Result<Option<Buffer>> {
        self.run_silu_mul(on, p, output)
    }

    fn residual_norm(&self, on: &Stream, p: &ResidualNormParams<'_>) -> Result<()> {
        self.run_residual_norm(on, p)
    }

    fn top_k(&self, on: &Stream, p: &TopKParams<'_>) -> Result<TopK> {
        self.run_top_k(on, p)
    }
}

impl Device for HostDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory_need(&self, config: &CommConfig, size: usize) -> Result<u64> {
        comm::memory_need(config, size)
    }

    fn join(self: Arc<Self>, boot: &dyn Bootstrap, config: &CommConfig) -> Result<Comm> {
        comm::join(self, boot, config)
    }

    fn machines_memory_need(&self, machines: Machines, config: &HierarchyConfig) -> Result<u64> {
        hierarchical::memory_need(machines, config)
    }

    fn join_machines(
        self: Arc<Self>,
        boot: &dyn Bootstrap,
        machines: Machines,
        config: &HierarchyConfig,
    ) -> Result<Hierarchy> {
        hierarchical::join(&self, boot, machines, config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn settings_that_cannot_be_are_refused_by_name() {
        let refused = |config: HostConfig| match HostDevice::with(&config) {
            Err(Error::Invalid { field, .. }) => field,
            other => panic!("{:?} instead of a wrong field", other.map(drop)),
        };
        for threads in [0, HostConfig::MOST_THREADS + 1, 50_000, usize::MAX] {
            let config = HostConfig {
                threads,
                ..HostConfig::default()
            };
            assert_eq!(refused(config), "threads");
        }
        let rail = |latency, bytes_per_us| HostConfig {
            rail: Some(RailModel {
                latency,
                bytes_per_us,
            }),
            ..HostConfig::default()
        };
        assert_eq!(refused(rail(Duration::MAX, 1)), "rail.latency");
        let much = Duration::from_secs(1 << 40);
        assert_eq!(refused(rail(much, u64::MAX)), "rail.latency");
        assert_eq!(refused(rail(Duration::ZERO, 0)), "rail.bytes_per_us");
        HostDevice::with(&rail(Duration::from_secs(86_400), 1)).unwrap();
    }
}
