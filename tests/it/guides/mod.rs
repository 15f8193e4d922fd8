//! What README and the guides tell a reader to paste works as pasted.

mod python;
mod sql_clients;
mod tour;

use std::path::PathBuf;

/// The root of the repository.
pub(crate) fn repository() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).canonicalize().unwrap()
}

/// The code blocks of a page that follow a heading, up to the next heading of its level or the end: what is written
/// behind the opening fence, and the code.
fn code_blocks(page: &str, heading: Option<&str>) -> Vec<(String, String)> {
    let page = std::fs::read_to_string(repository().join(page)).unwrap();
    let section = match heading {
        None => &*page,
        Some(heading) => {
            let (_, rest) = page.split_once(&format!("\n## {heading}\n")).expect("the page has this heading");
            rest.split("\n## ").next().unwrap()
        }
    };
    let mut blocks = Vec::new();
    for block in section.split("\n```").skip(1).step_by(2) {
        let (info, code) = block.split_once('\n').expect("a block has lines");
        blocks.push((info.to_owned(), code.to_owned()));
    }
    blocks
}

/// A port that is free at this moment. Below the range that the kernel assigns to clients, so that only a program that
/// requests this very port could take it.
pub(crate) fn free_port() -> u16 {
    let candidates = std::iter::repeat_with(|| 20_000 + u16::try_from(uuid::Uuid::new_v4().as_u128() % 6_000).unwrap());
    let is_free = |port: &u16| std::net::TcpListener::bind(("127.0.0.1", *port)).is_ok();
    candidates.take(100).find(is_free).expect("one of a hundred ports is free")
}
