//! Rows of a report on a machine. Two programs include this file: `cargo xtask doctor` and `brigade-perf doctor`.

use serde::Serialize;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    Ok,
    /// Missing, and something works without it.
    Absent,
    /// Missing, and nothing works without it.
    Missing,
}

#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub name: String,
    pub state: State,
    pub found: String,
    /// Short and stable, for programs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub todo: Option<String>,
}

impl Row {
    pub fn ok(name: impl Into<String>, found: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            state: State::Ok,
            found: found.into(),
            code: None,
            todo: None,
        }
    }

    pub fn absent(
        name: impl Into<String>,
        found: impl Into<String>,
        todo: impl Into<String>,
    ) -> Self {
        Self {
            state: State::Absent,
            todo: Some(todo.into()),
            ..Self::ok(name, found)
        }
    }

    pub fn missing(
        name: impl Into<String>,
        found: impl Into<String>,
        todo: impl Into<String>,
    ) -> Self {
        Self {
            state: State::Missing,
            ..Self::absent(name, found, todo)
        }
    }

    pub fn with_code(self, code: impl Into<String>) -> Self {
        Self {
            code: Some(code.into()),
            ..self
        }
    }
}

/// For people: a line for each row, more where there is more, and an arrow before what to do.
pub fn readable(rows: &[Row]) -> String {
    let indent = " ".repeat(24);
    let mut text = String::new();
    for row in rows {
        let mark = match row.state {
            State::Ok => "ok",
            State::Absent => "absent",
            State::Missing => "MISSING",
        };
        let found = row.found.replace('\n', &format!("\n{indent}"));
        text += &format!("{mark:<8} {:<14} {found}\n", row.name);
        if let Some(todo) = &row.todo {
            text += &format!("{indent}-> {todo}\n");
        }
    }
    text
}
