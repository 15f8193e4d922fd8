//! Tests of the precedence of contexts and of their file.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use cli::contexts::{Context, ContextsFile, READ_ONLY, Target, WITHOUT_DATABASE, command_path, is_context_variable};

use super::super::load::load_with;
use super::super::options;

/// A folder for one test, which is deleted at its end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        let path = std::env::temp_dir().join(format!("pillarbox-contexts-{}", uuid::Uuid::new_v4()));
        fs::create_dir(&path).unwrap();
        Folder(path)
    }

    fn write(&self, name: &str, text: &str, mode: u32) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    fn contexts(&self, text: &str) -> ContextsFile {
        ContextsFile::at(&self.write("contexts.toml", text, 0o600))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The context and the printed line of a command line.
fn choose(line: &str, env: &[(&str, &str)], file: &ContextsFile) -> Result<(Option<Target>, Option<String>), String> {
    let (cli, matches) = options::parse(line.split_whitespace()).unwrap();
    let variable = |name: &str| env.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
    Target::choose(&cli.given_options(), &command_path(&matches), variable, file).map_err(|error| error.to_string())
}

/// The data folder that a command line uses.
fn data_dir(line: &str, env: &[(&str, &str)], file: &ContextsFile) -> PathBuf {
    let (target, _) = choose(line, env, file).unwrap();
    let (cli, _) = options::parse(line.split_whitespace()).unwrap();
    let settings = env.iter().filter(|(name, _)| !is_context_variable(name));
    let settings = settings.map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    load_with(&cli, settings, target.as_ref()).unwrap().data_dir
}

#[test]
fn flags_win_over_variables_over_the_context_over_the_settings_file() {
    let folder = Folder::new();
    let config = folder.write("settings.toml", "data_dir = '/of-file'\nlog = 'warn'", 0o600);
    let text = format!(
        "selected = 'a'\n[contexts.a]\ndata_dir = '/a'\nconfig = '{0}'\n[contexts.b]\nconfig = '{0}'\n\
                        [contexts.c]\ndata_dir = '/c'",
        config.display()
    );
    let file = folder.contexts(&text);
    let (data, context) = ("PILLARBOX_DATA_DIR", "PILLARBOX_CONTEXT");
    for (line, env, expected) in [
        ("pillarbox status", &[][..], "/a"),
        ("pillarbox status --context b", &[], "/of-file"),
        ("pillarbox status", &[(context, "b")], "/of-file"),
        ("pillarbox --context c status", &[(context, "b")], "/c"),
        ("pillarbox status", &[(data, "/v")], "/v"),
        ("pillarbox status --data-dir /f", &[(data, "/v")], "/f"),
        ("pillarbox status --set data_dir=/s", &[(data, "/v")], "/s"),
        ("pillarbox status --context c --data-dir /f", &[], "/f"),
    ] {
        assert_eq!(data_dir(line, env, &file), Path::new(expected), "{line} {env:?}");
    }
    let (target, _) = choose("pillarbox status", &[], &file).unwrap();
    let (cli, _) = options::parse(["pillarbox", "status"]).unwrap();
    assert_eq!(load_with(&cli, Vec::new(), target.as_ref()).unwrap().log, "warn", "the settings file is loaded");
}

#[test]
fn a_context_is_not_combined_with_another_installation() {
    let folder = Folder::new();
    let file = folder.contexts("selected = 'a'\n[contexts.a]\ndata_dir = '/a'\nserver = 'http://a:1'");
    for (line, env) in [
        ("pillarbox key list --database-url postgres://h/n", &[][..]),
        ("pillarbox key list --config x.toml", &[]),
        ("pillarbox key list --set DATABASE_URL=postgres://h/n", &[]),
        ("pillarbox key list", &[("PILLARBOX_DATABASE_URL", "postgres://h/n")]),
    ] {
        let (target, note) = choose(line, env, &file).unwrap();
        assert!(target.is_none() && note.is_none(), "{line}");
    }
    let (target, note) = choose("pillarbox key list --context a --data-dir /b", &[], &file).unwrap();
    assert!(target.is_none());
    assert_eq!(note.unwrap(), "context a is not used: --data-dir names the installation");
}

#[test]
fn commands_that_change_something_name_their_context() {
    let folder = Folder::new();
    let file = folder.contexts("selected = 'a'\n[contexts.a]\ndata_dir = '/a'\nserver = 'http://a:1'");
    for line in ["pillarbox dead-letters discard --all --yes", "pillarbox cursors drop c", "pillarbox recover --skip"] {
        let (_, note) = choose(line, &[], &file).unwrap();
        assert_eq!(note.as_deref(), Some("context a: data folder /a, http://a:1"), "{line}");
    }
    for line in ["pillarbox status", "pillarbox cursors", "pillarbox key list"] {
        assert_eq!(choose(line, &[], &file).unwrap().1, None, "{line}");
    }
}

#[test]
fn the_lists_of_commands_name_existing_commands() {
    fn collect(command: &clap::Command, before: &str, known: &mut BTreeSet<String>) {
        for inner in command.get_subcommands() {
            let path = format!("{before} {}", inner.get_name()).trim().to_owned();
            collect(inner, &path, known);
            known.insert(path);
        }
    }
    let mut known = BTreeSet::new();
    collect(&options::command(), "", &mut known);
    for path in READ_ONLY.iter().chain(WITHOUT_DATABASE) {
        assert!(known.contains(*path), "{path}");
    }
    let verbs = ["delete", "discard", "drop", "reset", "revoke", "seek", "retry", "import", "remove"];
    assert!(READ_ONLY.iter().all(|path| !verbs.iter().any(|verb| path.contains(verb))));
}

#[test]
fn the_key_of_a_context_is_read_from_its_file_and_sent_to_its_server_alone() {
    let folder = Folder::new();
    let key = folder.write("key", "pbx_of_context\n", 0o600);
    let text = format!(
        "[contexts.a]\nserver = 'http://a:1'\napi_key_file = '{}'\n[contexts.b]\nserver = 'http://b:1'",
        key.display()
    );
    let file = folder.contexts(&text);
    let fill = |context: &str, server: Option<&str>, key: Option<&str>| {
        let (target, _) = choose(&format!("pillarbox subscribers list --context {context}"), &[], &file)?;
        let (mut server, mut key) = (server.map(str::to_owned), key.map(str::to_owned));
        target.unwrap().fill(&mut server, &mut key).map_err(|error| error.to_string())?;
        Ok::<_, String>((server.unwrap_or_default(), key.unwrap_or_default()))
    };
    let pair = |server: &str, key: &str| Ok((server.to_owned(), key.to_owned()));
    assert_eq!(fill("a", None, None), pair("http://a:1", "pbx_of_context"));
    assert_eq!(fill("a", None, Some("given")), pair("http://a:1", "given"));
    assert_eq!(fill("a", Some("http://other:1"), None), pair("http://other:1", ""));
    assert_eq!(fill("b", None, Some("given")), pair("http://b:1", "given"));
    let error = fill("b", None, None).unwrap_err();
    assert!(error.contains("context b") && error.contains("PILLARBOX_API_KEY"), "{error}");
    let error = choose("pillarbox parity --context a", &[], &file).unwrap_err();
    assert!(error.contains("context a") && error.contains("--data-dir"), "{error}");

    fs::set_permissions(&key, fs::Permissions::from_mode(0o640)).unwrap();
    let error = fill("a", None, None).unwrap_err();
    assert!(error.contains("context a") && error.contains("chmod 600") && !error.contains("pbx_"), "{error}");
    fs::remove_file(&key).unwrap();
    assert!(fill("a", None, None).unwrap_err().contains(key.to_str().unwrap()));
}

#[test]
fn a_file_that_cannot_be_used_is_named_with_what_to_do() {
    let folder = Folder::new();
    let status = |file: &ContextsFile| choose("pillarbox status --context prod", &[], file).unwrap_err();
    let error =
        status(&folder.contexts("[contexts.dev]\nserver = 'http://a:1'\n[contexts.test]\nserver = 'http://b:1'"));
    assert!(
        error.contains("no context prod") && error.contains("dev, test") && error.contains("contexts.toml"),
        "{error}"
    );
    let error = status(&ContextsFile::at(&folder.0.join("absent.toml")));
    assert!(error.contains("absent.toml") && error.contains("context add prod"), "{error}");
    for text in
        ["selected = 'dev'\n[contexts.dev\n", "selected = 'dev'\napi_key = 'hunter2'", "\nselected = {a = 'hunter2'}"]
    {
        let error = status(&folder.contexts(text));
        assert!(error.contains("contexts.toml") && error.contains("at line 2"), "{error}");
        assert!(error.contains("delete the file") && !error.contains("hunter2"), "{error}");
    }
    let error = status(&ContextsFile::at(&folder.0));
    assert!(error.contains("cannot be read") && error.contains("PILLARBOX_CONTEXTS"), "{error}");
    let error = status(&ContextsFile::at(&folder.write("open.toml", "", 0o666)));
    assert!(error.contains("others can change") && error.contains("chmod 600"), "{error}");
}

#[test]
fn twenty_concurrent_changes_are_all_stored_in_a_private_file() {
    let folder = Folder::new();
    let path = folder.0.join("new/contexts.toml");
    let add = |number: usize| {
        let context = Context { server: Some(format!("http://a:{number}")), ..Context::default() };
        ContextsFile::at(&path).change(|contexts| {
            contexts.contexts.insert(format!("c{number}"), context);
            Ok(())
        })
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (1..=20).map(|number| scope.spawn(move || add(number).unwrap())).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
    assert_eq!(ContextsFile::at(&path).read().unwrap().contexts.len(), 20);
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    let names: Vec<_> = fs::read_dir(folder.0.join("new")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["contexts.toml"], "no temporary file remains");
}

#[test]
fn the_file_is_in_the_config_folder_of_the_user() {
    let found = |env: &[(&str, &str)]| {
        let variable = |name: &str| env.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        ContextsFile::find(variable).map(|file| file.to_string())
    };
    let (home, xdg) = (("HOME", "/h"), ("XDG_CONFIG_HOME", "/x"));
    assert_eq!(found(&[]), None);
    assert_eq!(found(&[home]).unwrap(), "/h/.config/pillarbox/contexts.toml");
    assert_eq!(found(&[home, xdg]).unwrap(), "/x/pillarbox/contexts.toml");
    assert_eq!(found(&[home, xdg, ("PILLARBOX_CONTEXTS", "/c.toml")]).unwrap(), "/c.toml");
}
