//! Quantizing the rows of a matrix, with the bits that the host device gives, and the way back.

use crate::{CudaDevice, kernels::blocks_for, lane::Lane, memory::check_reach, types};
use brigade_device::{Buffer, DataType, QBuffer, QScheme, QView, Result, Stream, View};
use brigade_kernels::{DequantizeParams, GreatestParams, QuantizeParams, QuantizeRowsParams};
use std::sync::Arc;

impl CudaDevice {
    pub(crate) fn run_quantize(
        &self,
        on: &Stream,
        a: View<'_>,
        scheme: QScheme,
    ) -> Result<QBuffer> {
        let (kernel_type, scales_shape) = scheme.quantized(a)?;
        let lane = self.lane(on)?;
        let from = a.retain();
        check_reach(&self.card, "a.memory", &from)?;
        let kernel = self.scratch(lane, kernel_type, a.shape().dims())?;
        let scales = self.scratch(lane, DataType::F32, scales_shape.dims())?;
        let parts = [&kernel, &scales, &from];
        match scheme {
            _ if kernel.bytes() == 0 => self.fill_bytes(lane, &scales, 0)?,
            QScheme::Int8PerToken => self.quantize_rows(lane, parts, a.shape().columns())?,
            QScheme::Fp8PerTokenBlock => self.quantize_rows(lane, parts, QScheme::BLOCK)?,
            _ => self.quantize_across(lane, parts)?,
        }
        QBuffer::new(kernel, scales, None, scheme)
    }

    /// Groups of columns of one row each.
    fn quantize_rows(
        &self,
        lane: &Arc<Lane>,
        [kernel, scales, from]: [&Buffer; 3],
        group_columns: usize,
    ) -> Result<()> {
        let shape = kernel.shape();
        let parameters = QuantizeRowsParams {
            kernel: kernel.address(),
            scales: scales.address(),
            from: from.address(),
            rows: shape.rows() as u64,
            columns: shape.columns() as u64,
            group_columns: group_columns as u64,
            from_type: types::float_code(from.dtype()),
            kernel_type: types::kernel_code(kernel.dtype()),
        };
        let (k, groups) = (&self.opened.kernels, scales.shape().len());
        let buffers = [kernel, scales, from];
        // SAFETY: kernel and input have the same shape, and there is a scale for each group.
        unsafe { k.launch(&k.quantize_rows, lane, &buffers, groups, parameters) }
    }

    /// One scale for each column, or one for all.
    fn quantize_across(
        &self,
        lane: &Arc<Lane>,
        [kernel, scales, from]: [&Buffer; 3],
    ) -> Result<()> {
        let (k, shape) = (&self.opened.kernels, kernel.shape());
        let (rows, columns) = (shape.rows() as u64, shape.columns() as u64);
        let column_stride = u32::from(scales.shape().len() > 1);
        let from_type = types::float_code(from.dtype());
        let greatest = self.scratch(lane, DataType::U32, scales.shape().dims())?;
        self.fill_bytes(lane, &greatest, 0)?;
        let parameters = GreatestParams {
            greatest: greatest.address(),
            from: from.address(),
            rows,
            columns,
            from_type,
            column_stride,
        };
        let blocks = blocks_for(shape.len());
        // SAFETY: the input has this shape, and there is a word for each column, or one.
        unsafe { k.launch(&k.greatest, lane, &[&greatest, from], blocks, parameters) }?;
        let parameters = QuantizeParams {
            kernel: kernel.address(),
            scales: scales.address(),
            greatest: greatest.address(),
            from: from.address(),
            rows,
            columns,
            from_type,
            kernel_type: types::kernel_code(kernel.dtype()),
            column_stride,
            reserved: 0,
        };
        let buffers = [kernel, scales, &greatest, from];
        // SAFETY: kernel and input have the same shape, and there is a word and a scale for each column, or one.
        unsafe { k.launch(&k.quantize, lane, &buffers, blocks, parameters) }
    }

    /// A quantized matrix in f32, as it is stored.
    pub(crate) fn dequantize(&self, lane: &Arc<Lane>, q: &QView<'_>) -> Result<Buffer> {
        let (kernel, scales) = (q.kernel().retain(), q.scales().retain());
        let shape = kernel.shape();
        let out = self.scratch(lane, DataType::F32, shape.dims())?;
        if shape.is_empty() {
            return Ok(out);
        }
        let columns = shape.columns();
        let (row_stride, column_block, column_stride) = match q.scheme() {
            QScheme::Int8PerToken => (1, columns, 0),
            QScheme::Int8WeightOnly => (0, 1, 1),
            QScheme::Fp8PerTokenBlock => (columns.div_ceil(QScheme::BLOCK), QScheme::BLOCK, 1),
            _ => (0, columns, 0),
        };
        let parameters = DequantizeParams {
            out: out.address(),
            kernel: kernel.address(),
            scales: scales.address(),
            rows: (shape.len() / columns) as u64,
            columns: columns as u64,
            row_stride: row_stride as u64,
            column_block: column_block as u64,
            column_stride,
            kernel_type: types::kernel_code(kernel.dtype()),
        };
        let (k, blocks) = (&self.opened.kernels, blocks_for(shape.len()));
        let buffers = [&out, &kernel, &scales];
        // SAFETY: `QView` checked that there are as many scales as the scheme has groups.
        unsafe { k.launch(&k.dequantize, lane, &buffers, blocks, parameters) }?;
        Ok(out)
    }
}
