//! The most common passwords of at least 8 characters, from public lists of leaked ones. Shorter ones are refused anyway.

/// In lower case; compared without regard to case.
const COMMON: &str = "12345678 123456789 1234567890 12345678910 0123456789 123123123 123321123 123454321 987654321 9876543210 \
    87654321 11223344 112233445566 12341234 123456123 123456789a 123456789q 12345678a 1234567a 1234abcd 12345qwert 123qwe123 \
    123qweasd 147258369 159357456 159753456 1q2w3e4r 1q2w3e4r5t 1q2w3e4r5t6y 1qaz2wsx 1qaz2wsx3edc 1qazxsw2 qazwsxedc \
    qazwsx123 zaq12wsx zaq1zaq1 q1w2e3r4 q1w2e3r4t5 qwer1234 qwerasdf qwert123 qwerty12 qwerty123 qwerty1234 qwerty12345 \
    qwertyui qwertyuiop qwertz123 qwertzuiop azertyuiop asdfghjk asdfghjkl asdf1234 asdfasdf asd123456 zxcvbnm1 zxcvbnm123 \
    zxcvbnm, abc12345 abc123456 abcd1234 abcd12345 abcdefgh abcdefg1 aa123456 aa12345678 a1234567 a12345678 a123456789 \
    q12345678 password password1 password12 password123 password1234 password! passw0rd p@ssword p@ssw0rd pa55word \
    passwort passwort1 motdepasse contraseña contrasena senha123 parola123 haslo123 wachtwoord lozinka1 \
    iloveyou iloveyou1 iloveyou2 iloveyou! ihateyou loveyou1 princess princess1 sunshine sunshine1 football football1 \
    baseball baseball1 basketball superman superman1 spiderman batman123 starwars starwars1 pokemon1 pokemon123 naruto123 \
    dragon123 monkey123 tigger123 charlie1 michael1 jennifer jennifer1 jordan23 michelle nicole123 jessica1 daniel123 \
    ashley123 computer computer1 internet internet1 samsung1 samsung123 google123 facebook facebook1 linkedin whatever \
    whatever1 trustno1 letmein1 letmein123 welcome1 welcome12 welcome123 administrator admin123 admin1234 administrator1 \
    root1234 rootroot changeme changeme1 changeme123 default1 master123 secret123 test1234 testtest testing1 testing123 \
    guest123 user1234 login123 access14 hello123 hello1234 freedom1 liverpool liverpool1 arsenal1 chelsea1 barcelona \
    corvette mercedes maverick midnight butterfly chocolate elephant rainbow1 snoopy123 cookie123 summer123 summer2024 \
    winter123 winter2024 spring2024 autumn2024 blink182 metallica slipknot nirvana1 killer123 shadow123 ninja123 pakistan \
    pakistan123 india123 america1 london123 russia123 00000000 000000000 0000000000 11111111 111111111 1111111111 22222222 \
    33333333 44444444 55555555 66666666 77777777 88888888 88888888 99999999 999999999 aaaaaaaa xxxxxxxx";

/// Whether the password, in lower case, is one of the first that an attacker tries.
pub(crate) fn is_common(password: &str) -> bool {
    let mut letters = password.chars();
    let first = letters.next();
    letters.all(|letter| Some(letter) == first) || COMMON.split_whitespace().any(|common| common == password)
}
