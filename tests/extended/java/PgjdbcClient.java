import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.net.URI;
import java.sql.Connection;
import java.sql.Driver;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.SQLException;
import java.sql.Types;
import java.util.UUID;
import org.postgresql.util.PGobject;

/**
 * Runs the statements that the test writes to standard input.
 *
 * <p>Each line is a transaction: `commit` or `rollback`, a statement, and its values as `KIND VALUE`, separated by tabs. The answer
 * is one line: the id of the message, `error: ...`, or `unsupported` if the client has no such kind of value.
 */
public class PgjdbcClient {
    public static void main(String[] arguments) throws Exception {
        URI url = URI.create(System.getenv("DATABASE_URL"));
        String[] login = url.getUserInfo().split(":", 2);
        String address = "jdbc:postgresql://" + url.getHost() + ":" + url.getPort() + url.getPath();
        if (arguments.length > 0) {
            address += "?" + arguments[0];
        }
        Driver driver = DriverManager.getDriver(address);
        // The machine's package manager chooses the version.
        System.out.println(driver.getMajorVersion());
        try (Connection db = DriverManager.getConnection(address, login[0], login[1])) {
            db.setAutoCommit(false);
            BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
            for (String line = lines.readLine(); line != null; line = lines.readLine()) {
                System.out.println(answer(db, line.split("\t")));
            }
        }
    }

    private static String answer(Connection db, String[] fields) throws SQLException {
        try {
            // The change that the message reports.
            db.createStatement().execute("insert into orders default values");
            String id;
            try (PreparedStatement statement = db.prepareStatement(fields[1].replaceAll("\\$\\d+", "?"))) {
                for (int at = 2; at < fields.length; at++) {
                    String[] value = fields[at].split(" ", 2);
                    set(statement, at - 1, value[0], value[1]);
                }
                var rows = statement.executeQuery();
                rows.next();
                id = rows.getString(1);
            }
            if (fields[0].equals("commit")) {
                db.commit();
            }
            return id;
        } catch (UnsupportedOperationException error) {
            return "unsupported";
        } catch (SQLException error) {
            return "error: " + error.getMessage().lines().findFirst().get();
        } finally {
            db.rollback(); // It does nothing after a commit.
        }
    }

    private static void set(PreparedStatement statement, int at, String kind, String value) throws SQLException {
        switch (kind) {
            case "text" -> statement.setString(at, value);
            case "integer" -> statement.setInt(at, Integer.parseInt(value));
            case "uuid" -> statement.setObject(at, UUID.fromString(value));
            case "json", "jsonb" -> {
                PGobject object = new PGobject();
                object.setType(kind);
                object.setValue(value);
                statement.setObject(at, object);
            }
            case "null" -> statement.setNull(at, Types.NULL);
            default -> throw new UnsupportedOperationException(kind);
        }
    }
}
