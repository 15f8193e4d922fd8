//! Clients that three generators make of the OpenAPI document: each is generated without a warning, compiles, and works.
//! `scripts/setup test` installs the generators.

use std::fs::{self, copy, create_dir};
use std::path::Path;

use serde_json::json;
use server::migrations;
use testkit::{Client, TestApp, TestDatabase};
use tokio::process::Command;

use crate::server::process::DataFolder;
use crate::support::{collect_pages, text};

const PYTHON_PROGRAMS: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/python/bin");
const NODE_PROGRAMS: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/node/node_modules/.bin");
const TESTS: &str = env!("CARGO_MANIFEST_DIR");
/// The compiler is the slowest; it takes 6 s alone.
const TIME_MAX: std::time::Duration = std::time::Duration::from_secs(120);

/// A folder with the OpenAPI document of the server.
struct Workshop {
    folder: DataFolder,
    admin: Client,
}

impl Workshop {
    async fn new(app: &TestApp) -> Workshop {
        let workshop = Workshop { folder: DataFolder::new(), admin: app.admin() };
        create_dir(workshop.folder.path()).unwrap();
        let document = app.anonymous().get("/openapi.json").await.json();
        workshop.write("openapi.json", &document.to_string());
        workshop
    }

    fn write(&self, name: &str, content: &str) {
        fs::write(self.folder.path().join(name), content).unwrap();
    }

    fn copy(&self, program: &str) {
        let name = Path::new(program).file_name().unwrap();
        copy(format!("{TESTS}/{program}"), self.folder.path().join(name)).unwrap();
    }

    /// Runs a program in the folder, and returns what it has printed.
    async fn run(&self, program: &str, arguments: &[&str]) -> String {
        let path = format!("{PYTHON_PROGRAMS}:{NODE_PROGRAMS}:{}", std::env::var("PATH").unwrap());
        let mut command = Command::new(program);
        command
            .args(arguments)
            .current_dir(self.folder.path())
            .kill_on_drop(true)
            // The generator for Python formats its code with a program from the path.
            .env("PATH", path)
            .env("HOME", self.folder.path())
            .env("NO_COLOR", "1")
            .env("BASE_URL", self.admin.base())
            .env("API_KEY", self.admin.credential())
            .env("NAME", "generated");
        let output = tokio::time::timeout(TIME_MAX, command.output()).await.expect("it ends in time").unwrap();
        let printed = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap()).concat();
        assert!(output.status.success(), "{program} {arguments:?} (`scripts/setup test` installs it):\n{printed}");
        printed
    }

    async fn generate(&self, program: &str, arguments: &[&str]) {
        let printed = self.run(program, arguments).await;
        let lower = printed.to_lowercase();
        let complains = ["warn", "error", "unable", "skipping"].iter().any(|word| lower.contains(word));
        assert!(!complains, "{program} has generated with a warning:\n{printed}");
    }

    async fn compile(&self, program: &str) {
        let options = json!({
            "compilerOptions": {
                "strict": true, "target": "es2022", "module": "commonjs", "moduleResolution": "node10", "types": [],
                "lib": ["es2022", "dom", "dom.iterable"], "outDir": "built"
            },
            "files": [program]
        });
        self.write("tsconfig.json", &options.to_string());
        self.run("tsc", &["--project", "."]).await;
    }

    /// Fails unless the program has created the subscriber and posted the event whose id it has printed.
    async fn check(&self, printed: &str) {
        let subscribers = collect_pages(&self.admin, "/hub/v1/subscribers").await;
        let names: Vec<_> = subscribers.iter().map(|subscriber| text(&subscriber["name"])).collect();
        assert_eq!(names, ["generated"]);
        let event = self.admin.get(&format!("/hub/v1/events/{}", printed.trim())).await;
        assert_eq!((event.status, &event.json()["event_type"]), (200, &json!("order.paid")), "{printed}");
    }
}

#[tokio::test]
async fn openapi_python_client_generates_a_client_that_works() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let workshop = Workshop::new(&app).await;
    let options = ["generate", "--path", "openapi.json", "--output-path", "generated", "--meta", "none"];
    workshop.generate("openapi-python-client", &options).await;
    workshop.copy("python/generated_client.py");
    workshop.run("python", &["-W", "error", "-m", "compileall", "-q", "generated"]).await;
    let printed = workshop.run("python", &["generated_client.py"]).await;
    workshop.check(&printed).await;
    app.stop().await;
}

#[tokio::test]
async fn hey_api_generates_a_client_that_works() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let workshop = Workshop::new(&app).await;
    let options =
        ["--input", "openapi.json", "--output", "client", "--client", "@hey-api/client-fetch", "--no-log-file"];
    workshop.generate("openapi-ts", &options).await;
    workshop.copy("node/generated/hey_api.ts");
    workshop.compile("hey_api.ts").await;
    let printed = workshop.run("node", &["built/hey_api.js"]).await;
    workshop.check(&printed).await;
    app.stop().await;
}

#[tokio::test]
async fn openapi_typescript_generates_types_that_fit() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let workshop = Workshop::new(&app).await;
    workshop.generate("openapi-typescript", &["openapi.json", "--output", "schema.d.ts"]).await;
    workshop.copy("node/generated/openapi_typescript.ts");
    workshop.compile("openapi_typescript.ts").await;
    let printed = workshop.run("node", &["built/openapi_typescript.js"]).await;
    workshop.check(&printed).await;
    app.stop().await;
}

/// Generators name functions and types after them.
#[tokio::test]
async fn operations_have_distinct_names_as_a_person_would_give_them() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let document = app.anonymous().get("/openapi.json").await.json();
    let paths = document["paths"].as_object().unwrap();
    let operations = paths.values().flat_map(|item| item.as_object().unwrap().values());
    let mut names: Vec<&str> = operations.map(|operation| text(&operation["operationId"])).collect();
    let count = names.len();
    for name in &names {
        let is_camel_case = name.starts_with(|first: char| first.is_ascii_lowercase())
            && name.chars().all(|letter| letter.is_ascii_alphanumeric())
            && (name.contains(|letter: char| letter.is_ascii_uppercase()) || *name == "unsubscribe");
        assert!(is_camel_case, "give the operation {name} an `operation_id` such as createSubscriber");
    }
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count, "two operations have the same name");
    app.stop().await;
}
