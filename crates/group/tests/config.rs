//! Reading a group's set-up from variables: every error names the variable, what it was, and what it should be.
#![allow(clippy::unwrap_used)]

use brigade_device::Error;
use brigade_group::{Address, TcpConfig};
use std::{collections::BTreeMap, fmt::Write, time::Duration};

type Variables<'a> = BTreeMap<&'static str, &'a str>;

fn torchrun() -> Variables<'static> {
    BTreeMap::from([
        ("RANK", "3"),
        ("LOCAL_RANK", "1"),
        ("WORLD_SIZE", "4"),
        ("MASTER_ADDR", "node-0.example.org"),
        ("MASTER_PORT", "29500"),
        ("BRIGADE_SECRET", "correct horse battery staple"),
    ])
}

fn read(variables: &Variables<'_>) -> brigade_device::Result<TcpConfig> {
    TcpConfig::from_variables(|name| variables.get(name).map(Into::into))
}

#[test]
fn torchruns_variables_are_read() {
    let config = read(&torchrun()).unwrap();
    assert_eq!((config.rank, config.size), (3, 4));
    assert_eq!(config.local_rank, Some(1));
    assert_eq!(config.address, Address::tcp("node-0.example.org", 29500));
    assert!(config.secret.is_some());
    let mut fewer = torchrun();
    fewer.remove("LOCAL_RANK");
    fewer.remove("BRIGADE_SECRET");
    fewer.remove("MASTER_PORT");
    fewer.insert("MASTER_ADDR", "unix:/run/group");
    let config = read(&fewer).unwrap();
    assert_eq!(config.address, Address::Unix("/run/group".into()));
    assert!(config.local_rank.is_none() && config.secret.is_none());
    fewer.insert("MASTER_ADDR", "unix:");
    let nowhere = read(&fewer).unwrap_err().to_string();
    assert!(nowhere.contains("MASTER_ADDR"), "{nowhere}");
}

#[test]
fn rank_0_listens_beside_torchruns_agent_or_where_it_is_told_to() {
    let port = |more: &[(&'static str, &'static str)]| {
        let mut variables = torchrun();
        variables.extend(more.iter().copied());
        match read(&variables).map(|config| config.address) {
            Ok(Address::Tcp { port, .. }) => Ok(port),
            other => Err(format!("{other:?}")),
        }
    };
    let agent = |is| ("TORCHELASTIC_USE_AGENT_STORE", is);
    assert_eq!(port(&[agent("False")]), Ok(29500));
    assert_eq!(port(&[agent("True")]), Ok(29501));
    assert_eq!(port(&[agent("True"), ("BRIGADE_PORT", "7000")]), Ok(7000));
    assert_eq!(port(&[("BRIGADE_PORT", "7000")]), Ok(7000));
    let none_left = port(&[agent("True"), ("MASTER_PORT", "65535")]).unwrap_err();
    assert!(none_left.contains("1 to 65534"), "{none_left}");
    let none = port(&[("BRIGADE_PORT", "0")]).unwrap_err();
    assert!(none.contains("BRIGADE_PORT"), "{none}");
}

#[test]
fn a_secret_is_read_from_a_file_without_its_line_break() {
    let path = std::env::temp_dir().join(format!("brigade-secret-{}", std::process::id()));
    std::fs::write(&path, "correct horse battery staple\r\n").unwrap();
    let mut variables = torchrun();
    let secret = read(&variables).unwrap().secret;
    variables.remove("BRIGADE_SECRET");
    let file = path.to_str().unwrap().to_owned();
    variables.insert("BRIGADE_SECRET_FILE", &file);
    assert!(read(&variables).unwrap().secret == secret);
    std::fs::write(&path, "\n\n").unwrap();
    let error = read(&variables).unwrap_err().to_string();
    assert!(
        error.starts_with("BRIGADE_SECRET_FILE: got a secret of 0 bytes"),
        "{error}"
    );
    std::fs::remove_file(&path).unwrap();
    let error = read(&variables).unwrap_err().to_string();
    assert!(
        error.starts_with(&format!("BRIGADE_SECRET_FILE: got {file} (")),
        "{error}"
    );
}

#[test]
fn errors_name_the_variable_what_it_was_and_what_it_should_be() {
    let mut told = String::new();
    for (name, value) in [
        ("RANK", None),
        ("RANK", Some("")),
        ("RANK", Some("4")),
        ("RANK", Some("-1")),
        ("LOCAL_RANK", Some("one")),
        ("WORLD_SIZE", None),
        ("WORLD_SIZE", Some("0")),
        ("WORLD_SIZE", Some("100000")),
        ("MASTER_ADDR", None),
        ("MASTER_ADDR", Some("")),
        ("MASTER_PORT", None),
        ("MASTER_PORT", Some("0")),
        ("MASTER_PORT", Some("65536")),
        ("BRIGADE_SECRET", Some("short")),
        ("BRIGADE_SECRET_FILE", Some("/run/secret")),
    ] {
        let mut variables = torchrun();
        match value {
            Some(value) => variables.insert(name, value),
            None => variables.remove(name),
        };
        let error = read(&variables).unwrap_err();
        assert!(
            matches!(error, Error::Invalid { field, .. } if field == name),
            "{error:?}"
        );
        writeln!(told, "{error}").unwrap();
    }
    insta::assert_snapshot!(told);
}

#[test]
fn what_cannot_be_is_refused_before_anything_is_done() {
    let good = || TcpConfig::new(1, 2, Address::tcp("127.0.0.1", 29500));
    let long = Duration::from_secs(100_000);
    let mut told = String::new();
    for change in [
        (|c| c.rank = 2) as fn(&mut TcpConfig),
        |c| c.size = 0,
        |c| c.size = 1025,
        |c| c.join_within = Duration::ZERO,
        |c| c.heartbeat = Duration::ZERO,
        |c| c.silent_after = c.heartbeat,
        |c| c.address = Address::tcp("", 1),
        |c| c.address = Address::tcp("localhost", 0),
    ] {
        let mut config = good();
        change(&mut config);
        writeln!(
            told,
            "{}",
            brigade_group::TcpGroup::join(&config).unwrap_err()
        )
        .unwrap();
    }
    insta::assert_snapshot!(told);
    assert!(good().check().is_ok());
    let config = TcpConfig {
        join_within: long,
        ..good()
    };
    assert!(config.check().is_err());
}
