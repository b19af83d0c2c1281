use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use candle_core::Device;
use candle_core::quantized::ggml_file::qtensor_from_ggml;
use candle_core::quantized::gguf_file::{Content, TensorInfo};
use parking_lot::Mutex;

use super::{Config, Matrix, Metadata, Source, TensorId, check_range};
use crate::{Error, Result};

/// A model in a GGUF file.
///
/// Opening reads the head of the file and checks that every tensor is there, in the right shape and
/// within the file. Weights are read when asked for, and only the rows asked for.
#[derive(Debug)]
pub struct ModelFile {
    path: PathBuf,
    config: Config,
    metadata: Metadata,
    tensors: std::collections::HashMap<String, TensorInfo>,
    data_offset: u64,
    file: Mutex<File>,
}

/// Where some rows of a tensor lie.
struct Extent {
    offset_bytes: u64,
    row_bytes: u64,
}

impl ModelFile {
    /// Opens a file and checks its head.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Container`] for what is no GGUF file or a damaged one,
    /// [`Error::MissingField`], [`Error::MissingTensor`] and [`Error::Field`] for what is no model
    /// that the demo can run.
    pub fn open(path: &Path) -> Result<Self> {
        let mut file = File::open(path).map_err(|source| Error::io(path, source))?;
        let damaged = |what: String| Error::Container {
            path: path.to_owned(),
            what,
        };
        // The parser divides by the file's own alignment field, so a bad file can make it panic.
        let content = catch_unwind(AssertUnwindSafe(|| {
            Content::read(&mut BufReader::new(&mut file))
        }))
        .map_err(|_| damaged("its head makes no sense".to_owned()))?
        .map_err(|error| damaged(error.to_string()))?;
        let length_bytes = file
            .seek(SeekFrom::End(0))
            .map_err(|source| Error::io(path, source))?;

        let metadata = Metadata::new(content.metadata);
        let model = Self {
            path: path.to_owned(),
            config: Config::from_metadata(&metadata)?,
            metadata,
            tensors: content.tensor_infos,
            data_offset: content.tensor_data_offset,
            file: Mutex::new(file),
        };
        model.check_tensors(length_bytes)?;
        Ok(model)
    }

    /// The fields at the head of the file, the tokenizer's among them.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn check_tensors(&self, length_bytes: u64) -> Result<()> {
        for unsupported in ["output.weight", "rope_freqs.weight"] {
            if self.tensors.contains_key(unsupported) {
                let want = "absent: the head is tied and rotary positions unscaled";
                return Err(Error::field(
                    format!("tensor `{unsupported}`"),
                    "present",
                    want,
                ));
            }
        }
        for id in TensorId::all(&self.config) {
            let [rows, columns] = id.shape(&self.config)?;
            let got = self.info(id)?.shape.dims();
            if got != [rows, columns] && (rows > 1 || got != [columns]) {
                return Err(Error::field(
                    format!("shape of `{id}`"),
                    format!("{got:?}"),
                    format!("{:?}", [rows, columns]),
                ));
            }
            let extent = self.extent(id, columns)?;
            let end_bytes = (rows as u64)
                .checked_mul(extent.row_bytes)
                .and_then(|size| size.checked_add(extent.offset_bytes));
            if end_bytes.is_none_or(|end| end > length_bytes) {
                let got = end_bytes.map_or("past any file".to_owned(), |end| end.to_string());
                return Err(Error::field(
                    format!("end of `{id}`"),
                    got,
                    format!("at most the file's {length_bytes} bytes"),
                ));
            }
        }
        Ok(())
    }

    fn info(&self, id: TensorId) -> Result<&TensorInfo> {
        let want = id.shape(&self.config)?;
        let tensor = id.to_string();
        self.tensors
            .get(&tensor)
            .ok_or(Error::MissingTensor { tensor, want })
    }

    fn extent(&self, id: TensorId, columns: usize) -> Result<Extent> {
        let info = self.info(id)?;
        let block = info.ggml_dtype.block_size();
        if !columns.is_multiple_of(block) {
            let field = format!("row length of `{id}`");
            return Err(Error::field(
                field,
                columns,
                format!("a multiple of {:?}'s block, {block}", info.ggml_dtype),
            ));
        }
        let offset_bytes = self.data_offset.checked_add(info.offset).ok_or_else(|| {
            Error::field(format!("offset of `{id}`"), info.offset, "within the file")
        })?;
        Ok(Extent {
            offset_bytes,
            row_bytes: (columns / block * info.ggml_dtype.type_size()) as u64,
        })
    }
}

impl Source for ModelFile {
    fn config(&self) -> &Config {
        &self.config
    }

    fn rows(&self, id: TensorId, rows: Range<usize>) -> Result<Matrix> {
        let [all_rows, columns] = id.shape(&self.config)?;
        check_range(&format!("rows of {id}"), &rows, all_rows)?;
        if rows.is_empty() {
            return Matrix::new(0, columns, Vec::new());
        }
        let extent = self.extent(id, columns)?;
        let size_bytes = rows.len() * extent.row_bytes as usize;
        // Words, because candle reads the blocks in place and they must be aligned.
        let mut words = vec![0_u64; size_bytes.div_ceil(8)];
        let raw = &mut bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..size_bytes];
        {
            let mut file = self.file.lock();
            file.seek(SeekFrom::Start(
                extent.offset_bytes + rows.start as u64 * extent.row_bytes,
            ))
            .and_then(|_| file.read_exact(raw))
            .map_err(|source| Error::io(&self.path, source))?;
        }
        let values = qtensor_from_ggml(
            self.info(id)?.ggml_dtype,
            raw,
            vec![rows.len(), columns],
            &Device::Cpu,
        )
        .and_then(|tensor| tensor.dequantize(&Device::Cpu))
        .and_then(|tensor| tensor.flatten_all())
        .and_then(|tensor| tensor.to_vec1())
        .map_err(|error| Error::Container {
            path: self.path.clone(),
            what: format!("`{id}`: {error}"),
        })?;
        Matrix::new(rows.len(), columns, values)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::quantized::GgmlDType;
    use candle_core::quantized::gguf_file::Value;

    use super::*;
    use crate::testing::{Gguf, TempDir};

    fn check(change: impl FnOnce(&mut Gguf), want: &str) {
        let directory = TempDir::new();
        let mut gguf = Gguf::tiny();
        change(&mut gguf);
        let path = directory.write("bad.gguf", &gguf.bytes());
        let got = ModelFile::open(&path).unwrap_err().to_string();
        assert_eq!(got.replace(&path.display().to_string(), "PATH"), want);
    }

    #[test]
    fn a_field_that_is_missing_or_wrong_is_named() {
        check(
            |g| g.remove("llama.block_count"),
            "metadata field `llama.block_count` is missing, wanted a count",
        );
        check(
            |g| g.set("llama.block_count", Value::String("two".into())),
            "metadata field `llama.block_count` is a string of 3 bytes, wanted a count",
        );
        check(
            |g| g.set("llama.block_count", Value::I32(-1)),
            "metadata field `llama.block_count` is I32(-1), wanted a count",
        );
        check(
            |g| g.set("llama.block_count", Value::U32(0)),
            "layers is 0, wanted 1 to 1024",
        );
        check(
            |g| g.set("llama.attention.head_count", Value::U32(0)),
            "heads is 0, wanted 1 to 1024",
        );
        check(
            |g| g.set("llama.attention.head_count_kv", Value::U32(3)),
            "kv_heads is 3, wanted a divisor of the 4 heads",
        );
        check(
            |g| g.set("general.architecture", Value::String("mamba".into())),
            "general.architecture is mamba, wanted llama",
        );
        check(
            |g| g.set("llama.rope.dimension_count", Value::U32(4)),
            "llama.rope.dimension_count is 4, wanted the heads' width, 8",
        );
        check(
            |g| g.set("llama.rope.scaling.type", Value::String("yarn".into())),
            "llama.rope.scaling.type is yarn, wanted none",
        );
    }

    #[test]
    fn a_tensor_that_is_missing_or_misshapen_is_named() {
        check(
            |g| g.drop_tensor("blk.0.ffn_up.weight"),
            "tensor `blk.0.ffn_up.weight` is missing, wanted shape [64, 32]",
        );
        check(
            |g| g.add_tensor("blk.0.ffn_up.weight", &[64, 64], GgmlDType::F32),
            "shape of `blk.0.ffn_up.weight` is [64, 64], wanted [64, 32]",
        );
        check(
            |g| g.add_tensor("output.weight", &[288, 32], GgmlDType::F32),
            "tensor `output.weight` is present, wanted absent: the head is tied and rotary \
             positions unscaled",
        );
    }

    #[test]
    fn a_file_cut_anywhere_is_an_error() {
        let directory = TempDir::new();
        let bytes = Gguf::tiny().bytes();
        for kept in (0..bytes.len() - 32).step_by(37) {
            let path = directory.write("cut.gguf", &bytes[..kept]);
            assert!(
                ModelFile::open(&path).is_err(),
                "opened with {kept} of {} bytes",
                bytes.len()
            );
        }
        assert!(ModelFile::open(&directory.write("whole.gguf", &bytes)).is_ok());
    }

    #[test]
    fn no_damaged_head_panics() {
        let directory = TempDir::new();
        let bytes = Gguf::tiny().bytes();
        let head = bytes.len().min(12_000);
        for place in (0..head).step_by(13) {
            let mut damaged = bytes.clone();
            damaged[place] ^= 0xff;
            let path = directory.write("damaged.gguf", &damaged);
            if let Err(error) = ModelFile::open(&path) {
                assert!(!error.to_string().is_empty());
            }
        }
        check(
            |g| g.set("general.alignment", Value::U32(0)),
            "PATH is not a readable GGUF file: its head makes no sense",
        );
    }

    #[test]
    fn rows_and_columns_are_pieces_of_the_tensor() {
        let directory = TempDir::new();
        let model = ModelFile::open(&directory.write("tiny.gguf", &Gguf::tiny().bytes())).unwrap();
        for id in TensorId::all(model.config()) {
            let whole = model.tensor(id).unwrap();
            let [rows, columns] = id.shape(model.config()).unwrap();
            assert_eq!([whole.rows(), whole.columns()], [rows, columns]);
            for piece in [0..0, 0..1, rows / 3..rows, rows..rows] {
                assert_eq!(
                    model.rows(id, piece.clone()).unwrap(),
                    whole.cut_rows(piece).unwrap(),
                    "{id}"
                );
            }
            for piece in [0..0, 0..1, columns / 3..columns] {
                assert_eq!(
                    model.columns(id, piece.clone()).unwrap(),
                    whole.cut_columns(piece).unwrap(),
                    "{id}"
                );
            }
        }
        let past = model
            .rows(TensorId::Embedding, 280..289)
            .unwrap_err()
            .to_string();
        assert_eq!(
            past,
            "rows of token_embd.weight is 280..289, wanted a range within 0..288"
        );
        let layer = model
            .tensor(TensorId::AttentionNorm(2))
            .unwrap_err()
            .to_string();
        assert_eq!(layer, "layer is 2, wanted below 2");
    }
}
