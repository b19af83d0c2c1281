//! Compiles `kernels/*.cu` to fatbins and embeds them. With no nvcc the crate builds all the same and holds no kernels,
//! unless `BRIGADE_REQUIRE_CUDA=1` makes that an error.

#[path = "build/nvcc.rs"]
#[allow(clippy::missing_docs_in_private_items, dead_code, missing_docs)]
mod nvcc;
#[path = "src/params.rs"]
#[allow(dead_code)]
mod params;

use std::{
    env,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::exit,
};

fn main() {
    for variable in ["NVCC", "CUDA_HOME", "CUDA_PATH", "BRIGADE_REQUIRE_CUDA"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    for file in [
        "build.rs",
        "build",
        "src/params.rs",
        "src/params_experts.rs",
        "src/params_few_rows.rs",
        "src/params_fifo.rs",
        "src/params_group.rs",
        "src/params_linear.rs",
        "src/params_low_latency.rs",
        "src/params_pushed.rs",
        "src/constants.rs",
    ] {
        println!("cargo::rerun-if-changed={file}");
    }
    if let Err(why) = build() {
        println!("cargo::error={}", why.replace('\n', "\ncargo::error="));
        exit(1);
    }
}

fn build() -> Result<(), String> {
    let out = PathBuf::from(variable("OUT_DIR")?);
    let required = env::var_os("BRIGADE_REQUIRE_CUDA").is_some_and(|v| v == "1");
    let found = sources().and_then(|folder| Ok((folder, nvcc::find(&toolchains(&out))?)));
    let embedded = match found {
        Ok((folder, nvcc)) => {
            println!("cargo::rerun-if-changed={}", folder.display());
            println!("cargo::rerun-if-changed={}", nvcc.path.display());
            embed(&folder, &nvcc, &out)?
        }
        Err(why) if required => {
            return Err(format!(
                "BRIGADE_REQUIRE_CUDA=1, but {why}; run `cargo xtask toolchain`, or set CUDA_HOME"
            ));
        }
        Err(why) => absent(&why),
    };
    fs::write(out.join("embedded.rs"), embedded).map_err(|e| e.to_string())
}

/// Compiles every file and writes the Rust that embeds the results.
fn embed(folder: &Path, nvcc: &nvcc::Nvcc, out: &Path) -> Result<String, String> {
    let mut statics = String::new();
    let mut list = String::new();
    let all = nvcc.compile(folder, &params::header(), &cache(out), &|_| {})?;
    for nvcc::Compiled { name, fatbin, .. } in all {
        // This build's own, whatever becomes of the others.
        let kept = out.join(format!("{name}.fatbin"));
        fs::copy(&fatbin, &kept).map_err(|e| format!("{}: {e}", fatbin.display()))?;
        let upper = name.to_uppercase();
        let _ = writeln!(
            statics,
            "static {upper}: &Aligned<[u8]> = &Aligned(*include_bytes!({kept:?}));"
        );
        let _ = writeln!(list, "    Fatbin {{ name: {name:?}, bytes: &{upper}.0 }},");
    }
    let (major, minor) = nvcc.version;
    Ok(format!(
        "{statics}pub(crate) static EMBEDDED: &[Fatbin] = &[\n{list}];\n\
         pub(crate) const COMPILER: Option<(u32, u32)> = Some(({major}, {minor}));\n\
         pub(crate) const ABSENCE: &str = \"\";\n"
    ))
}

fn absent(why: &str) -> String {
    format!(
        "pub(crate) static EMBEDDED: &[Fatbin] = &[];\n\
         pub(crate) const COMPILER: Option<(u32, u32)> = None;\n\
         pub(crate) const ABSENCE: &str = {why:?};\n"
    )
}

/// Where fatbins are kept: under the target folder, for all profiles, and for `cargo xtask kernels`.
fn cache(out: &Path) -> PathBuf {
    let targets: Vec<&Path> = out.ancestors().skip(4).take(2).collect();
    // cargo marks it; with an explicit target triple it is one deeper.
    let ours = |dir: &&&Path| {
        let marks = ["CACHEDIR.TAG", ".rustc_info.json"];
        marks.iter().any(|mark| dir.join(mark).is_file())
    };
    let marked = targets.iter().find(ours);
    marked.map_or_else(|| out.join("kernels"), |dir| dir.join("kernels"))
}

/// The kernels' sources: inside the package where it was packaged, else in the repository.
fn sources() -> Result<PathBuf, String> {
    let here = PathBuf::from(variable("CARGO_MANIFEST_DIR")?);
    [here.join("cu"), here.join("../../kernels")]
        .into_iter()
        .find(|dir| dir.join("fill.cu").is_file())
        .ok_or_else(|| "the kernels' sources are not beside this package".into())
}

/// Where `cargo xtask toolchain` installs: under the target folder, which is five levels above OUT_DIR's `out`
/// (profile/build/package/out), or one deeper with an explicit target triple; and the repository's own.
fn toolchains(out: &Path) -> Vec<PathBuf> {
    out.ancestors()
        .skip(4)
        .take(2)
        .map(Path::to_owned)
        .chain([PathBuf::from("../../target")])
        .map(|target| target.join("toolchain"))
        .collect()
}

fn variable(name: &str) -> Result<String, String> {
    env::var(name).map_err(|_| format!("cargo did not set {name}"))
}
