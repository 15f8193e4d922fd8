//! Attacks with passwords: guesses, and so many sign-ins that others have to wait.

use std::time::Duration;

use futures_util::future::join_all;
use serde_json::json;
use uuid::Uuid;

use super::accounts::{PASSWORD, address, insert_accounts};
use super::bystander::Bystander;
use super::client::Request;
use super::finding::{Finding, Measured};
use super::lab::{ATTACKER_IP, BYSTANDER_IP, Lab, Setting};
use crate::Outcome;

const GUESSES: usize = 230;
const RIGHT_GUESS: usize = 200;
/// A person signs in so often.
const SIGN_IN_PERIOD: Duration = Duration::from_millis(500);

/// An attacker with a copied access token guesses the password 230 times at once. The 200th guess is right, and must
/// not be accepted after so many wrong ones. Repeated with other accounts.
pub(super) async fn password_guesses(setting: Setting<'_>) -> Outcome<Finding> {
    let lab = Lab::start(setting, "").await?;
    let accounts: Vec<Uuid> = (0..4).map(|n| Uuid::from_u128(0x8888_0000 + n)).collect();
    insert_accounts(lab.db(), &accounts).await?;
    let person = sign_ins(&lab).await?;
    lab.measure("password-guesses", &person, async |lab, running| {
        let mut accepted = 0;
        for account in accounts {
            let login = json!({"email": address(account), "password": PASSWORD});
            let tokens = lab.client("", ATTACKER_IP).expect(&Request::post("/identity/v1/login", login)).await?;
            let token = tokens["access_token"].as_str().ok_or("a sign-in without an access token")?;
            let client = lab.client(token, ATTACKER_IP);
            let guess = |number: usize| {
                let guess = if number == RIGHT_GUESS { PASSWORD.to_owned() } else { format!("wrong guess {number}") };
                let change = json!({"current_password": guess, "new_password": "four other random words"});
                let client = client.clone();
                async move {
                    // In the order of the numbers: the right guess is not among the first ones.
                    tokio::time::sleep(Duration::from_millis(number as u64 / 10)).await;
                    client.send(&Request::post("/identity/v1/password/change", change)).await
                }
            };
            for answer in join_all((0..GUESSES).map(guess)).await {
                running.answers.add_answer(&answer);
                accepted += u32::from(answer.is_ok_and(|answer| answer.status == 200));
            }
        }
        Ok(vec![Measured::new("right guesses accepted", f64::from(accepted), "guesses").at_most(0.0)])
    })
    .await
}

/// 400 connections sign in with the correct password of one account. Another person signs in from another network.
pub(super) async fn sign_ins_of_one_account(setting: Setting<'_>) -> Outcome<Finding> {
    let lab = Lab::start(setting, "").await?;
    let account = Uuid::from_u128(0x8888_0000);
    insert_accounts(lab.db(), &[account]).await?;
    let person = sign_ins(&lab).await?;
    let stranger = lab.client("", ATTACKER_IP);
    lab.measure("sign-ins-of-one-account", &person, async |_, running| {
        let login = Request::post("/identity/v1/login", json!({"email": address(account), "password": PASSWORD}));
        running.flood(&stranger, 400, move |_| login.clone()).await?;
        Ok(Vec::new())
    })
    .await
}

/// Persons who sign in, each with another account.
async fn sign_ins(lab: &Lab) -> Outcome<Bystander> {
    let accounts: Vec<Uuid> = (0..10).map(|n| Uuid::from_u128(0x9999_0000 + n)).collect();
    insert_accounts(lab.db(), &accounts).await?;
    let client = lab.client("", BYSTANDER_IP);
    let login = move |number: u64| {
        let account = accounts[number as usize % accounts.len()];
        Request::post("/identity/v1/login", json!({"email": address(account), "password": PASSWORD}))
    };
    Ok(Bystander::new(client, login).every(SIGN_IN_PERIOD))
}
