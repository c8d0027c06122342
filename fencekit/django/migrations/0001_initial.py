"""Makes the two tables."""

from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True
    dependencies = ()
    operations = (
        migrations.CreateModel(
            name="Fence",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("kind", models.TextField()),
                ("resource", models.TextField()),
                ("token", models.BigIntegerField()),
                ("sequence", models.BigIntegerField(default=0)),
                ("at", models.DateTimeField(db_index=True)),
            ],
            options={
                "db_table": "fencekit_fences",
                "constraints": [
                    models.UniqueConstraint(
                        fields=("kind", "resource"), name="fencekit_fences_resource"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="Operation",
            fields=[
                ("key", models.TextField(primary_key=True, serialize=False)),
                ("token", models.BigIntegerField(null=True)),
                ("fingerprint", models.TextField(null=True)),
                ("result", models.TextField(null=True)),
                ("at", models.DateTimeField(db_index=True)),
            ],
            options={"db_table": "fencekit_operations"},
        ),
    )
