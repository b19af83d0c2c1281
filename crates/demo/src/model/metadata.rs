use std::collections::HashMap;

use candle_core::quantized::gguf_file::Value;

use crate::{Error, Result};

/// The named fields at the head of a GGUF file, read with the type that the caller needs.
#[derive(Clone, Debug, Default)]
pub struct Metadata {
    fields: HashMap<String, Value>,
}

impl Metadata {
    pub(super) fn new(fields: HashMap<String, Value>) -> Self {
        Self { fields }
    }

    /// A number of things: any integer type that is not negative.
    ///
    /// # Errors
    /// [`Error::MissingField`] or [`Error::Field`].
    pub fn count(&self, field: &str) -> Result<usize> {
        self.read(field, "a count", count)
    }

    /// As [`Metadata::count`], `None` where the field is absent.
    ///
    /// # Errors
    /// [`Error::Field`].
    pub fn optional_count(&self, field: &str) -> Result<Option<usize>> {
        self.optional(field, |metadata| metadata.count(field))
    }

    /// A number with a fraction.
    ///
    /// # Errors
    /// [`Error::MissingField`] or [`Error::Field`].
    pub fn real(&self, field: &str) -> Result<f32> {
        self.read(field, "a float", |value| match value {
            Value::F32(number) => Some(*number),
            Value::F64(number) => Some(*number as f32),
            _ => None,
        })
    }

    /// A string.
    ///
    /// # Errors
    /// [`Error::MissingField`] or [`Error::Field`].
    pub fn text(&self, field: &str) -> Result<&str> {
        self.read(field, "a string", text)
    }

    /// As [`Metadata::text`], `None` where the field is absent.
    ///
    /// # Errors
    /// [`Error::Field`].
    pub fn optional_text(&self, field: &str) -> Result<Option<&str>> {
        self.optional(field, |metadata| metadata.text(field))
    }

    /// A list of strings.
    ///
    /// # Errors
    /// [`Error::MissingField`] or [`Error::Field`].
    pub fn texts(&self, field: &str) -> Result<Vec<&str>> {
        self.read(field, "a list of strings", |value| {
            list(value)?.iter().map(text).collect()
        })
    }

    /// A list of counts.
    ///
    /// # Errors
    /// [`Error::MissingField`] or [`Error::Field`].
    pub fn counts(&self, field: &str) -> Result<Vec<usize>> {
        self.read(field, "a list of counts", |value| {
            list(value)?.iter().map(count).collect()
        })
    }

    fn optional<'a, T>(
        &'a self,
        field: &str,
        read: impl Fn(&'a Self) -> Result<T>,
    ) -> Result<Option<T>> {
        if self.fields.contains_key(field) {
            read(self).map(Some)
        } else {
            Ok(None)
        }
    }

    fn read<'a, T>(
        &'a self,
        field: &str,
        want: &'static str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<T> {
        let value = self.fields.get(field).ok_or_else(|| Error::MissingField {
            field: field.to_owned(),
            want,
        })?;
        read(value)
            .ok_or_else(|| Error::field(format!("metadata field `{field}`"), describe(value), want))
    }
}

fn count(value: &Value) -> Option<usize> {
    match *value {
        Value::U8(number) => Some(number.into()),
        Value::U16(number) => Some(number.into()),
        Value::U32(number) => usize::try_from(number).ok(),
        Value::U64(number) => usize::try_from(number).ok(),
        Value::I8(number) => usize::try_from(number).ok(),
        Value::I16(number) => usize::try_from(number).ok(),
        Value::I32(number) => usize::try_from(number).ok(),
        Value::I64(number) => usize::try_from(number).ok(),
        _ => None,
    }
}

fn text(value: &Value) -> Option<&str> {
    if let Value::String(text) = value {
        Some(text)
    } else {
        None
    }
}

fn list(value: &Value) -> Option<&[Value]> {
    if let Value::Array(list) = value {
        Some(list)
    } else {
        None
    }
}

/// A value for an error message: lists and strings may be as long as the file, so only what they
/// are is said.
fn describe(value: &Value) -> String {
    match value {
        Value::Array(list) => format!("a list of {}", list.len()),
        Value::String(text) => format!("a string of {} bytes", text.len()),
        number => format!("{number:?}"),
    }
}
